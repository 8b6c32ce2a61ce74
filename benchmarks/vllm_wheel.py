"""Everything of vLLM that the product names, looked up in the sources of a wheel, the one for CUDA too, without a GPU.

    pip download --no-deps vllm==0.32.0 && python -m zipfile -e vllm-*.whl WHEEL
    python -m benchmarks.vllm_wheel WHEEL

Nothing of the wheel is imported. Imports, calls of what is imported, calls of the engine and overridden methods are
read from the product's own sources; what it reads of vLLM's objects is the table READ below. A name or a parameter that
is not there is a line with "MISSING", and the exit code is 1.
"""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from benchmarks.results import ROOT
from prefixrl.common.config.workers.vllm import VllmConfig
from prefixrl.common.engines.vllm.setup import VllmSetup, engine_arguments
from prefixrl.common.weights.low_rank import LowRank

SOURCES = (
    *sorted((ROOT / "common/engines/vllm").glob("*.py")),
    ROOT / "scorer/process/vllm_model.py",
)
ENGINES = {"engine.py": ("vllm.v1.engine.async_llm", "AsyncLLM"), "vllm_model.py": ("vllm", "LLM")}
"""By source, the class of the object that it calls `llm` or `self._llm`."""
READ = {
    ("vllm.outputs", "CompletionOutput"): "token_ids logprobs weight_versions",
    ("vllm.outputs", "RequestOutput"): "outputs prompt_logprobs",
    ("vllm.v1.metrics.stats", "SchedulerStats"): "num_running_reqs",
    (
        "vllm.config",
        "VllmConfig",
    ): "scheduler_config parallel_config cache_config model_config speculative_config compilation_config "
    "attention_config use_v2_model_runner",
    ("vllm.config", "SchedulerConfig"): "max_num_seqs max_num_batched_tokens",
    ("vllm.config", "ParallelConfig"): "data_parallel_size",
    ("vllm.config", "CacheConfig"): "num_gpu_blocks block_size cache_dtype",
    ("vllm.config", "ModelConfig"): "quantization dtype get_head_size",
    ("vllm.config", "SpeculativeConfig"): "method num_speculative_tokens",
    ("vllm.config", "CompilationConfig"): "cudagraph_mode",
    ("vllm.config", "AttentionConfig"): "backend",
    ("vllm.logprobs", "Logprob"): "logprob",
    ("vllm.platforms.interface", "Platform"): "is_cpu",
    ("vllm.usage.usage_lib", "UsageContext"): "LLM_CLASS",
    ("vllm.sampling_params", "RequestOutputKind"): "DELTA",
    ("vllm.v1.engine.output_processor", "RequestOutputCollector"): "get",
    (
        "vllm.distributed.weight_transfer.base",
        "WeightTransferEngine",
    ): "parse_update_info model model_config",
    (
        "vllm.distributed.weight_transfer.factory",
        "WeightTransferEngineFactory",
    ): "_registry register_engine",
    (
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod",
    ): "process_weights_after_loading",
    ("vllm.lora.layers.base_linear", "BaseLinearLayerWithLoRA"): "lora_a_stacked lora_b_stacked",
    ("vllm.v1.worker.gpu_worker", "Worker"): "model_runner",
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner"): "get_model",
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"): "get_model",
}
"""Attributes that the product reads, by module and class."""


@dataclass(frozen=True)
class Found:
    """A definition in the wheel."""

    module: str
    node: ast.AST

    @property
    def place(self) -> str:
        """Module and line."""
        return f"{self.module}:{getattr(self.node, 'lineno', 1)}"


class Wheel:
    """Sources of an unpacked wheel."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[str, ast.Module] = {}

    def tree(self, module: str) -> ast.Module | None:
        """Return the source of a module, parsed; None where there is none."""
        base = self._folder.joinpath(*module.split("."))
        path = next(
            (each for each in (base.with_suffix(".py"), base / "__init__.py") if each.is_file()),
            None,
        )
        if path is not None and module not in self._trees:
            self._trees[module] = ast.parse(path.read_text(encoding="utf-8"))
        return self._trees.get(module)

    def is_package(self, module: str) -> bool:
        """Return True for a folder of modules."""
        return self._folder.joinpath(*module.split("."), "__init__.py").is_file()

    def find(self, module: str, name: str, depth: int = 0) -> Found | None:
        """Return the definition of a name of a module, through imports of it."""
        tree = self.tree(module)
        if tree is None or depth > 8:
            return None
        for node in ast.walk(tree):
            match node:
                case (
                    ast.ClassDef(name=own)
                    | ast.FunctionDef(name=own)
                    | ast.AsyncFunctionDef(name=own)
                ) if own == name:
                    return Found(module, node)
                case ast.ImportFrom(names=names) if any(
                    (each.asname or each.name) == name for each in names
                ):
                    (own,) = {each.name for each in names if (each.asname or each.name) == name}
                    return self.find(self._absolute(module, node), own, depth + 1)
                case (
                    ast.Assign(targets=[ast.Name(id=own)]) | ast.AnnAssign(target=ast.Name(id=own))
                ) if own == name:
                    return Found(module, node)
                case ast.Dict(
                    keys=keys, values=values
                ):  # names that a package looks up when they are asked for
                    for key, value in zip(keys, values, strict=True):
                        if (
                            isinstance(key, ast.Constant)
                            and key.value == name
                            and isinstance(value, ast.Constant)
                        ):
                            inner, _, own = str(value.value).partition(":")
                            if own:
                                return self.find(module + inner, own, depth + 1)
        return Found(module, tree) if module.endswith(f".{name}") else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        parts = module.split(".")
        base = parts[: len(parts) - node.level + self.is_package(module)] if node.level else []
        return ".".join([*base, *([node.module] if node.module else [])])

    def lineage(self, module: str, name: str) -> list[Found]:
        """Return a class and those that it is derived from, as far as they are in the wheel."""
        found = self.find(module, name)
        if found is None or not isinstance(found.node, ast.ClassDef):
            return []
        bases = [
            each.value if isinstance(each, ast.Subscript) else each for each in found.node.bases
        ]
        names = [each.id for each in bases if isinstance(each, ast.Name)]
        return [found, *(one for each in names for one in self.lineage(found.module, each))]

    def member(self, module: str, name: str, member: str, is_called: bool = False) -> Found | None:
        """Return a method, field, or attribute that some method of a class assigns; of a called one no abstract one."""
        for part in self.lineage(module, name):
            for node in ast.walk(part.node):
                match node:
                    case ast.FunctionDef() | ast.AsyncFunctionDef() if is_called and is_abstract(
                        node
                    ):
                        continue
                    case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own) if (
                        own == member
                    ):
                        return Found(part.module, node)
                    case ast.AnnAssign(target=ast.Name(id=own) | ast.Attribute(attr=own)) if (
                        own == member
                    ):
                        return Found(part.module, node)
                    case (
                        ast.Attribute(attr=own, ctx=ast.Store()) | ast.Name(id=own, ctx=ast.Store())
                    ) if own == member:
                        return Found(part.module, node)
        return None

    def accepts(self, called: Found, positional: int, keywords: set[str]) -> str:
        """Return what of a call a function or a class does not take, or ""."""
        node, module = called.node, called.module
        if isinstance(node, ast.ClassDef):
            own = self.member(module, node.name, "__init__")
            if own is None:
                fields = {
                    each.target.id
                    for part in self.lineage(module, node.name)
                    for each in getattr(part.node, "body", ())
                    if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
                }
                return ", ".join(sorted(keywords - fields))
            node = own.node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return "it is no function"
        taken = node.args
        names = {each.arg for each in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
        lacking = set() if taken.kwarg else keywords - names
        room = len(taken.posonlyargs) + len(taken.args) - ("self" in names)
        return ", ".join(
            sorted(lacking)
            + [f"{positional} positional arguments"] * (positional > room and not taken.vararg)
        )


def is_abstract(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a method that a derived class has to define."""
    return any("abstract" in ast.unparse(mark) for mark in node.decorator_list)


def imported(tree: ast.Module) -> dict[str, tuple[str, str]]:
    """Return module and name of what a source of the product imports of vLLM, by its name there."""
    return {
        each.asname or each.name: (node.module, each.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm"
        for each in node.names
    }


def calls(tree: ast.Module) -> Iterator[tuple[ast.expr, int, set[str]]]:
    """Yield what is called, its positional arguments and its keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.func, len(node.args), {each.arg for each in node.keywords if each.arg}


def lines_of(wheel: Wheel) -> Iterator[tuple[str, str]]:
    """Yield what is looked up, and where it is or what is missing."""
    for source in SOURCES:
        tree = ast.parse(source.read_text(encoding="utf-8"))
        names = imported(tree)
        for module, name in names.values():
            found = wheel.find(module, name)
            yield f"{source.name}: from {module} import {name}", found.place if found else "MISSING"
        for called, positional, keywords in calls(tree):
            match called:
                case ast.Name(id=name) if name in names and (found := wheel.find(*names[name])):
                    yield (
                        f"{source.name}: {name}({shown(positional, keywords)})",
                        verdict(wheel, found, positional, keywords),
                    )
                case ast.Attribute(
                    value=ast.Name(id="llm") | ast.Attribute(attr="_llm"), attr=method
                ):
                    engine = ENGINES[source.name]
                    member = wheel.member(*engine, method, is_called=True)
                    what = f"{source.name}: {engine[1]}.{method}({shown(positional, keywords)})"
                    yield what, verdict(wheel, member, positional, keywords)
        yield from overridden(wheel, source.name, tree, names)
        for variable in sorted(
            set(re.findall(r'"(VLLM_[A-Z0-9_]+)"', source.read_text(encoding="utf-8")))
        ):
            tree_of = wheel.tree("vllm.envs")
            has = tree_of is not None and any(
                isinstance(n, ast.Constant) and n.value == variable for n in ast.walk(tree_of)
            )
            yield f"{source.name}: variable {variable}", "vllm.envs" if has else "MISSING"
    for (module, name), attributes in READ.items():
        for attribute in attributes.split():
            found = wheel.member(module, name, attribute)
            yield f"read: {name}.{attribute}", found.place if found else "MISSING"
    for key in engine_keys():
        found = wheel.member("vllm.engine.arg_utils", "AsyncEngineArgs", key)
        yield f"setup.py: AsyncEngineArgs.{key}", found.place if found else "MISSING"


def overridden(
    wheel: Wheel, source: str, tree: ast.Module, names: Mapping[str, tuple[str, str]]
) -> Iterator[tuple[str, str]]:
    """Yield the methods of classes derived from vLLM's, and the abstract ones that they leave open."""
    for own in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for base in (
            each.id for each in own.bases if isinstance(each, ast.Name) and each.id in names
        ):
            methods = {each.name: each for each in own.body if isinstance(each, ast.FunctionDef)}
            for method, node in methods.items():
                if method == "__init__":
                    continue
                found = wheel.member(*names[base], method)
                given = {each.arg for each in node.args.args}
                theirs = getattr(getattr(found, "node", None), "args", None)
                takes = {each.arg for each in theirs.args} if theirs else set()
                lacking = "" if node.args.vararg else ", ".join(sorted(takes - given))
                place = found.place if found else "MISSING"
                yield (
                    f"{source}: {own.name} overrides {base}.{method}",
                    f"MISSING: {lacking}" if lacking else place,
                )
            left = [
                each.name
                for part in wheel.lineage(*names[base])
                for each in getattr(part.node, "body", ())
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                and is_abstract(each)
                and each.name not in methods
            ]
            yield (
                f"{source}: {own.name} leaves no abstract method",
                f"MISSING: {left}" if left else "none left",
            )


def verdict(wheel: Wheel, found: Found | None, positional: int, keywords: set[str]) -> str:
    """Return where a call leads, or what of it is missing."""
    if found is None:
        return "MISSING"
    lacking = wheel.accepts(found, positional, keywords)
    return f"MISSING: {lacking}" if lacking else found.place


def shown(positional: int, keywords: set[str]) -> str:
    """Return a call's arguments for a reader."""
    return ", ".join([*["."] * positional, *(f"{each}=" for each in sorted(keywords))])


def engine_keys() -> list[str]:
    """Return the arguments that the product may hand to the engine."""
    keys: set[str] = set(VllmConfig.model_fields) & {
        "quantization",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
    }
    for role in ("rollout", "scorer"):
        setup = VllmSetup(
            "model",
            role,
            "cuda",
            1,
            "bfloat16",
            "bfloat16",
            True,
            128,
            VllmConfig(),
            LowRank(8, 16, ("q_proj",)),
        )
        keys |= engine_arguments(setup, "cuda").keys() | engine_arguments(setup, "cpu").keys()
    return sorted(keys | {"max_num_seqs", "attention_backend"})


@click.command()
@click.argument("wheel", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(wheel: Path) -> None:
    """Look everything up and print it; exit code 1 where something is missing."""
    lines = list(lines_of(Wheel(wheel)))
    for what, where in lines:
        print(f"{what}  ->  {where}")
    missing = sum(where.startswith("MISSING") for _, where in lines)
    print(f"{len(lines)} looked up, {missing} missing")
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
