"""Settings of a run in other programs: each leads to a key of ours, or to the reason why there is none."""

import pytest

from prefixrl.common.config.catalogue import ABSENT, SYNONYMS, settings
from prefixrl.deploy.commands.config import explained

LAST_NAMES = {setting.key.rsplit(".", 1)[-1] for setting in settings()}

# Facts of their sources: OpenRLHF v0.6.1 (train_ppo_ray), verl b178a3cd (ppo_trainer), TRL f2cd5771
# (GRPOConfig, RLOOConfig, ModelConfig, and transformers' TrainingArguments), prime-rl 559b4477 (rl),
# OpenR 54ae004c (train_math).
FLAGS = {
    "openrlhf_0_6_1": """
        actor_init_on_gpu actor_learning_rate actor_num_gpus_per_node actor_num_nodes adam_betas
        adam_offload advantage_estimator apply_chat_template aux_loss_coef bf16 ckpt_path
        colocate_actor_ref colocate_all_models colocate_critic_reward critic_learning_rate
        critic_num_gpus_per_node critic_num_nodes critic_pretrain deepspeed_enable_sleep
        disable_ds_ckpt disable_fast_tokenizer enable_ema enable_prefix_caching enforce_eager
        eps_clip eval_steps flash_attn freezing_actor_steps gamma generate_max_len
        grad_accum_dtype gradient_checkpointing gradient_checkpointing_use_reentrant
        init_kl_coef input_key input_template kl_estimator kl_target l2 label_key lambd
        load_checkpoint load_in_4bit local_rank logging_steps lora_alpha lora_dropout lora_rank
        lr_warmup_ratio max_ckpt_mem max_ckpt_num max_epochs max_len max_norm max_samples
        micro_rollout_batch_size micro_train_batch_size n_samples_per_prompt normalize_reward
        num_episodes overlap_comm packing_samples perf pretrain pretrain_data
        pretrain_data_probs pretrain_split prompt_data prompt_data_probs prompt_max_len
        prompt_split ptx_coef ref_num_gpus_per_node ref_num_nodes ref_reward_offload
        remote_rm_url reward_clip_range reward_num_gpus_per_node reward_num_nodes
        reward_pretrain ring_attn_size ring_head_stride rollout_batch_size save_hf_ckpt
        save_path save_steps save_value_network seed target_modules temperature top_p
        train_batch_size use_kl_loss use_ms use_tensorboard use_wandb value_clip
        value_head_prefix vllm_enable_sleep vllm_gpu_memory_utilization vllm_num_engines
        vllm_sync_backend vllm_sync_with_ray vllm_tensor_parallel_size wandb_group wandb_org
        wandb_project wandb_run_name zero_stage zpg
    """,
    "verl": """
        adv_estimator agent_loop_config_path all_ranks analysis apply_chat_template_kwargs
        async_save balance_batch betas bypass_mode calculate_entropy calculate_log_probs
        calculate_sum_pi_squared capture_range capture_range_end checkpoint_engine.backend
        class_name class_path clip_cov_lb clip_cov_ratio clip_cov_ub clip_grad clip_ratio
        clip_ratio_c clip_ratio_high clip_ratio_low cliprange_value
        controller_nsight_options.trace critic.enable critic_warmup cuda_graph_trace
        cuda_memory_usage cudagraph_capture_sizes custom_async_server.name
        custom_async_server.path custom_chat_template custom_cls.name custom_cls.path
        custom_reward_function.name custom_reward_function.path data_loader_seed
        data_parallel_size datagen.name datagen.path dataloader_num_workers default_agent_loop
        default_hdfs_dir default_local_dir del_local_ckpt_after_load detach_encoder device
        disable_log_stats discrete do_sample dtype enable_activation_offload
        enable_chunked_prefill enable_gradient_checkpointing enable_prefix_caching
        enable_resource_pool enable_rollout enable_rollout_routing_replay enable_train
        enforce_eager engine_kwargs entropy_checkpointing entropy_coeff
        entropy_from_logits_with_chunking esi_redundant_time exclude_modules experiment_name
        expert_parallel_size external_lib filter_overlong_prompts
        filter_overlong_prompts_workers forward_max_token_len_per_gpu forward_micro_batch_size
        forward_micro_batch_size_per_gpu forward_only forward_prefetch free_cache_engine
        freeze_vision_tower fsdp_size full_determinism gamma global_profiler.save_path
        global_profiler.steps global_profiler.tool gpu_memory_utilization grad_clip
        hf_config_path horizon hybrid_engine ignore_eos image_key image_patch_size impl_backend
        input_tokenizer interaction_config_path kl_coef kl_cov_ratio kl_ctrl.type kl_loss_coef
        kl_loss_type kl_penalty kw_args lam launch_reward_fn_async layered_summon limit_images
        load_contents load_format log_prob_max_token_len_per_gpu log_prob_micro_batch_size
        log_prob_micro_batch_size_per_gpu log_prob_use_dynamic_bsz log_val_generations logger
        logprobs_mode lora_adapter_path lora_alpha lora_rank loss_agg_mode loss_mode
        loss_scale_factor lr lr_scheduler_type lr_warmup_steps lr_warmup_steps_ratio
        max_actor_ckpt_to_keep max_assistant_turns max_concurrent max_critic_ckpt_to_keep
        max_model_len max_num_batched_tokens max_num_seqs max_parallel_calls max_prompt_length
        max_response_length max_samples_per_step_per_worker max_tool_response_length
        max_user_turns memory_limit_mb micro_batch_size micro_batch_size_per_gpu min_lr_ratio
        min_num_params model.path model_dtype module.name module.path mtp mtp.enable mtp.method
        mtp_loss_scaling_factor multi_stage_wake_up multi_turn.enable multi_turn.format n
        n_gpus_per_node nccl_timeout nnodes norm_adv_by_std_in_grpo npu.contents npu.level
        num_cpus num_cycles num_repeat_rollouts num_shards num_speculative_tokens num_workers
        offload_policy optimizer optimizer_impl optimizer_offload over_sample_rate
        override_config override_optimizer_config param_offload pipeline_model_parallel_size
        ppo_epochs ppo_kl_coef ppo_max_token_len_per_gpu ppo_micro_batch_size
        ppo_micro_batch_size_per_gpu ppo_mini_batch_size profile_continuous_steps
        profiler.enable profiler.ranks profiler.save_path profiler.tool project_name
        prometheus.enable prometheus.file prometheus.port prompt_key prompt_length quantization
        quantization_config_file ray_wait_register_center_timeout record_file replay_file
        reshard_after_forward response_length resume_from_path resume_mode return_full_prompt
        return_multi_modal_inputs return_raw_chat return_raw_input_ids reward_fn_key
        reward_loop_class_name reward_loop_module_path reward_loop_source reward_manager
        reward_manager.name reward_manager.source reward_model.enable reward_model.max_length
        reweight_method rollout.mode rollout.name rollout_correction.loss_type rollout_data_dir
        rollout_is rollout_is_batch_normalize rollout_is_threshold rollout_n rollout_rs
        rollout_rs_threshold router_replay.mode sandbox_fusion.url save_contents save_freq
        scheduling_policy seed served_model_name sglang shuffle skip_dump_dir skip_rollout
        skip_tokenizer_init speculative_algorithm speculative_eagle_topk
        speculative_num_draft_tokens speculative_num_steps stack_depth stacks strategy
        sum_pi_squared_checkpointing target_kl target_modules tau_neg tau_pos temperature
        tensor_model_parallel_size test_freq tiled_mlp.enabled timeline_json_file token2text
        tokenization_sanity_check_mode tokenizer tokenizer_path tool_config tool_config_path
        tool_response_truncate_side top_k top_p torch.contents torch_memory.context total_epochs
        total_training_steps trace.backend trace_alloc_max_entries train_batch_size train_files
        train_max_samples transfer_queue.enable trtllm truncation trust_remote_code
        ulysses_sequence_parallel_size update_weights_bucket_megabytes use_dynamic_bsz
        use_fused_kernels use_inference_chat_template use_kl_in_reward use_kl_loss
        use_legacy_worker_impl use_liger use_orig_params use_pf_ppo use_prefix_grouper
        use_remove_padding use_reward_loop use_shm use_torch_compile val_batch_size
        val_before_train val_files val_max_samples val_only validation_data_dir
        validation_shuffle video_key vllm warmup_style weight_decay weight_pow
        worker_nsight_options.kill worker_nsight_options.trace
    """,
    "trl": """
        accelerator_config adam_beta1 adam_beta2 adam_epsilon attn_implementation
        auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16
        bf16_full_eval bnb_4bit_quant_storage bnb_4bit_quant_type cache_implementation
        cast_lm_head_to_fp32 chat_template_kwargs data_seed dataloader_drop_last
        dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
        dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor
        ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters
        ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout disable_tqdm do_eval
        do_predict do_train ds3_gather_for_generation dtype enable_jit_checkpoint entropy_coef
        entropy_coef_delta entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high
        eval_accumulation_steps eval_delay eval_do_concat_batches eval_on_start eval_steps
        eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp fsdp_config
        full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
        gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push
        hub_model_id hub_private_repo hub_revision hub_strategy hub_token ignore_data_skip
        importance_sampling_level include_for_metrics include_num_input_tokens_seen label_names
        label_smoothing_factor learning_rate length_column_name liger_kernel_config
        load_best_model_at_end load_in_4bit load_in_8bit local_rank log_completions
        log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node
        log_unique_prompts logging_first_step logging_nan_inf_filter logging_steps
        logging_strategy lora_alpha lora_dropout lora_modules_to_save lora_r lora_target_modules
        lora_target_parameters lora_task_type loss_type lr_scheduler_kwargs lr_scheduler_type
        mask_truncated_completions max_completion_length max_grad_norm max_steps
        max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs
        model_name_or_path model_revision multi_objective_aggregation neftune_noise_alpha
        normalize_advantages num_completions_to_print num_generations num_generations_eval
        num_iterations num_train_epochs off_policy_mask_threshold optim optim_args
        optim_target_modules output_dir pad_to_multiple_of parallelism_config
        per_device_eval_batch_size per_device_train_batch_size prediction_loss_only project
        push_to_hub ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns
        repetition_penalty report_to restore_callback_states_from_checkpoint
        resume_from_checkpoint reward_clip_range reward_weights router_aux_loss_coef run_name
        sapo_temperature_neg sapo_temperature_pos save_on_each_node save_only_model save_steps
        save_strategy save_total_limit scale_rewards seed shuffle_dataset skip_memory_metrics
        steps_per_generation sync_ref_model temperature tf32 top_entropy_quantile top_k top_p
        torch_compile torch_compile_backend torch_compile_mode torch_empty_cache_steps
        trackio_bucket_id trackio_space_id trackio_static_space_id train_sampling_strategy
        transformers_continuous_batching_config trust_remote_code use_adaptive_entropy
        use_bias_correction_kl use_bnb_nested_quant use_cache use_cpu use_dora use_liger_kernel
        use_peft use_rslora use_transformers_continuous_batching use_transformers_paged use_vllm
        vespo_k_neg vespo_k_pos vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode
        vllm_gpu_memory_utilization vllm_group_port vllm_importance_sampling_cap
        vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
        vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length
        vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port
        vllm_server_timeout vllm_structured_outputs_regex vllm_tensor_parallel_size warmup_steps
        weight_decay
    """,
    "prime_rl": """
        account action_loss_type admin_base_url adv_tau all2all_backend alpha api_key_var
        api_server_count backend_port base_url batch_size betas1 betas2 broadcasts_dir
        chat_template clean cleanup_grace_period collect_inference_metrics conversion_dir cp
        cp_style cpu_optimizer_backend data_parallel_rpc_port data_parallel_size
        data_parallel_size_local decay decay_steps decode_env_vars decode_nodes_per_replica
        decode_port decode_scorer_overrides decode_sidecar_port decode_vllm_overrides
        deepep_num_sms deepep_token_chunk_size demo_key device_name dir dist_timeout_seconds
        dp_replicate dppo_mask_high dppo_mask_low dropout dry_run dtype enable_a2a enable_dbo
        enable_eplb enable_expert_parallel enable_fp32_lm_head enable_fp32_router_logits
        enable_grouped_gemm enable_lora enable_prefix_caching enable_return_routed_experts
        enable_router_replay enable_token_export enforce_eager entity env_server_base_port ep
        ep_comm_backend episode_agents exclude extra_body extra_headers_from_state
        filter_zero_advantages force_balanced_routing freeze_moe_router freeze_vision_encoder
        freq fsdp_cpu_offload fullgraph fused_lm_head_token_chunk_size generate_samples
        gpu_memory_utilization gpus_per_node group group_size headers_from_env host hwm
        ignore_patterns impl import_path inference_metrics_roles inference_world_size
        initial_inflight interval ipo_threshold job_name json_logging keep_interval keep_last
        kl_tau language_model_attr liveness_timeout_seconds log_data lora_target_modules lr
        matmul_precision max_completion_tokens max_cpu_loras max_inflight
        max_inflight_activations max_lora_rank max_loras max_model_len max_norm
        max_off_policy_steps max_steps memory_profiler_path min_inflight min_lr min_p
        modules_to_save moe_fused_kernel moe_router_dtype moe_use_grouped_mm momentum mu
        nesterov nodelist nodes_per_fsdp_group non_cached_tokens num_bytes num_decode_replicas
        num_examples num_infer_gpus num_infer_nodes num_infer_replicas num_input_tokens_weight
        num_layers num_nodes num_output_tokens_weight num_prefill_replicas num_train_gpus
        num_train_nodes num_train_workers num_turns_weight numa_bind offline optim_cpu_offload
        optimization_dtype orchestrator_on_inference output_dir pad_to_multiple_of partition
        pin_memory policy pre_run_command prefill_env_vars prefill_nodes_per_replica
        prefill_port prefill_scorer_overrides prefill_vllm_overrides project project_dir
        quantize_in_weight_transfer random_init rank ranks_filter ratio reasoning_effort
        reasoning_parser recipe reduce_dtype reject_max reject_min reshard_after_forward
        resume_step retrigger_on_resume rope_scaling scorers seed seq_len session_id shared_fs
        skip_dataloader skip_first_step skip_model_check skip_optimizer skip_progress
        skip_scheduler step tags target_modules targets tasks_per_minute temperature template
        template_path tensor_parallel_size threshold time timeout token_batch_size
        tool_call_parser top_k top_p topk_freq topk_pattern trace_path trust_remote_code
        use_deep_gemm use_pd_kv_transfer vf_level vision_encoder_attr wait_for_ready_timeout
        wait_for_weights_timeout warmup_steps weight weight_decay
    """,
    "openr": """
        algorithm_name clip_param critic_lr cuda cuda_deterministic data_chunk_length
        dataset_name dataset_path entropy_coef env_name episode_length eval_episodes
        eval_interval experiment_name gae_lambda gain gamma gradient_cp_steps hidden_size
        huber_delta layer_N log_interval lr max_grad_norm max_new_tokens model_dir
        model_name_or_path n_eval_rollout_threads n_render_rollout_threads n_rollout_threads
        n_training_threads num_accumulation_steps num_env_steps num_mini_batch opti_eps
        ppo_epoch prm_checkpoint_path prm_model_name_or_path prm_type recurrent_N save_interval
        seed share_policy stacked_frames use_ReLU use_centralized_V use_clipped_value_loss
        use_eval use_feature_normalization use_gae use_huber_loss use_linear_lr_decay
        use_max_grad_norm use_naive_recurrent_policy use_obs_instead_of_state use_orthogonal
        use_policy_active_masks use_popart use_proper_time_limits use_recurrent_policy
        use_stacked_frames use_value_active_masks use_valuenorm use_wandb user_name vacab_size
        value_loss_coef weight_decay
    """,
}


@pytest.mark.parametrize("program", FLAGS)
def test_every_flag_of_another_program_is_answered_by_a_key_or_a_reason(program: str) -> None:
    names = FLAGS[program].split()
    answers = {name: next(explained(name)) for name in names}
    assert len(names) > 60
    assert [
        name
        for name in names
        if not (SYNONYMS.keys() | ABSENT.keys() | LAST_NAMES) & {name, name.rsplit(".", 1)[-1]}
    ] == []
    assert all(
        answers[name].startswith(f"{name}: there is none, because ")
        for name in names
        if name in ABSENT.keys() - LAST_NAMES
    )
    assert SYNONYMS.keys().isdisjoint(ABSENT)
