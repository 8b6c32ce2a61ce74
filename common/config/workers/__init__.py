"""The sections of the workers, and the engines that they may have.

sections.py     `[rollout]` and `[scorer]`: engine, sampling, judging
engine_record.py  what an engine is: a record of facts and functions, by which packages add others
engines.py      all engines by name, those of installed packages too
vllm.py         the vLLM engine: its record and its options
served.py       targets and rewards behind HTTP: addresses, and the record of the served target
process_model.py  `[scorer.prm]`: a fixed model that scores the steps of answers
simulated.py    the engine without a model: its record and `[simulated]`
launch.py       `[launch]` and `[slurm]`: numbers of processes, GPUs, jobs
"""
