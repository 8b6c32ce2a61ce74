"""A process reward model in transformers: the probability of each step, in batches padded on the right.

The output layer computes at the tags alone. Heads that a folder's own code would make are read from
the weights.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch
from safetensors import safe_open
from torch.nn.utils.rnn import pad_sequence

from prefixrl.common.config.workers.process_model import ProcessModelConfig
from prefixrl.common.errors import ConfigError, DataError
from prefixrl.common.host.cuda import has_cuda
from prefixrl.common.models.config_file import positions_of
from prefixrl.common.models.loading import HEADS, Kind, load_model
from prefixrl.scorer.process.formats import Marked, StepForm
from prefixrl.scorer.process.step_scoring import StepModel


class TorchStepModel(StepModel):
    """A loaded model, of either format."""

    def __init__(self, folder: str, settings: ProcessModelConfig, form: StepForm) -> None:
        """Load the model; DataError without some weights, ConfigError without the candidates."""
        self._device = torch.device("cuda" if has_cuda(settings.device, "scorer.prm") else "cpu")
        self._batch_tokens = settings.batch_tokens
        self._tags: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_causal = settings.format == "step_tag"
        description, kind = description_of(folder, settings)
        self._model = load_model(folder, description, settings.dtype, kind)
        if self._is_causal:
            layer = self._model.get_output_embeddings()
            self._columns = form.candidates()
            check_candidates(self._columns, int(layer.weight.shape[0]), settings)
            layer.register_forward_pre_hook(self._at_tags)
        else:
            self._head = head_of(folder, settings).to(self._device, self._model.dtype)
            self._columns = (settings.good_class, 1 - settings.good_class)
        self.most_positions = positions_of(self._model.config.get_text_config().to_dict())
        torch.nn.Module.to(self._model, self._device).requires_grad_(False)

    def step_scores(self, rows: Sequence[Marked]) -> Iterator[float]:
        """Yield the scores; rows beside a row change its scores by rounding."""
        return chain.from_iterable(map(self._of_batch, batches(rows, self._batch_tokens)))

    @torch.inference_mode()
    def _of_batch(self, rows: Sequence[Marked]) -> list[float]:
        texts = [torch.from_numpy(row.tokens.astype("int64")) for row in rows]
        ids = pad_sequence(texts, batch_first=True).to(self._device)
        mask = pad_sequence([torch.ones_like(text) for text in texts], batch_first=True).to(
            self._device
        )
        tags = [(index, at) for index, row in enumerate(rows) for at in row.tag_positions]
        lines, places = torch.tensor(tags, dtype=torch.int64, device=self._device).T
        self._tags = lines, places
        try:
            output = self._model(input_ids=ids, attention_mask=mask, use_cache=False)
        finally:
            self._tags = None
        if self._is_causal:
            logits: torch.Tensor = output.logits[0]
        else:
            logits = self._head(output.last_hidden_state[lines, places])
        return good_shares(logits, self._columns)

    def _at_tags(self, _: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        """Give the output layer the hidden states at the tags, as one row: the vocabulary is large."""
        assert self._tags is not None, "called by `_of_batch` alone"
        return (arguments[0][self._tags].unsqueeze(0),)


def good_shares(logits: torch.Tensor, columns: tuple[int, int]) -> list[float]:
    """Return the probability of the first of two columns, for each line of logits."""
    shares: list[float] = torch.softmax(logits[:, list(columns)].float(), dim=-1)[:, 0].tolist()
    return shares


def batches(rows: Sequence[Marked], most_tokens: int) -> Iterator[list[Marked]]:
    """Yield the rows in order, in batches of at most `most_tokens` padded tokens, or of one row."""
    batch: list[Marked] = []
    width = 0
    for row in rows:
        wider = max(width, row.tokens.size)
        if batch and wider * (len(batch) + 1) > most_tokens:
            yield batch
            batch = []
            wider = row.tokens.size
        batch = [*batch, row]
        width = wider
    if batch:
        yield batch


def description_of(folder: str, settings: ProcessModelConfig) -> tuple[str, Kind]:
    """Return the words for the model in a message, and what transformers loads of it."""
    kind: Kind = "causal" if settings.format == "step_tag" else "backbone"
    return f"scorer.prm.model = {folder!r} (as format = {settings.format!r})", kind


def check_candidates(candidates: tuple[int, int], size: int, settings: ProcessModelConfig) -> None:
    """Raise ConfigError for a candidate that is outside the output layer."""
    for key, token in zip(("good_token", "bad_token"), candidates, strict=True):
        if token >= size:
            raise ConfigError(
                f"scorer.prm.{key} is token {token}, the output layer of {settings.model} has only {size}; give a "
                f"token that the model was trained with"
            )


def head_tensors(folder: str) -> dict[str, torch.Tensor]:
    """Return the weights of a folder's head by their names."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {
                name: file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 -- a file of tensors cannot be iterated
                if name.split(".")[0] in HEADS[:2]
            }
    return tensors


def head_of(folder: str, settings: ProcessModelConfig) -> torch.nn.Module:
    """Return the head: one linear layer, or two with a ReLU between, as Qwen2.5-Math-PRM has."""
    tensors = head_tensors(folder)
    # Names of layers end in their number, so this is the order of the layers.
    weights = sorted(name for name in tensors if name.endswith("weight"))
    shapes = [tuple(tensors[name].shape) for name in weights]
    if len(weights) not in (1, 2) or any(len(shape) != 2 for shape in shapes) or shapes[-1][0] != 2:
        described = (
            ", ".join(f"{name} {shape}" for name, shape in zip(weights, shapes, strict=True))
            or "none"
        )
        raise DataError(
            f'scorer.prm.format = "two_class": {settings.model} has no head of two classes of one or two layers; '
            f'weights named score or classifier: {described}; use format = "step_tag" for a causal model'
        )
    layers: list[torch.nn.Module] = []
    for name in weights:
        bias = tensors.get(name.removesuffix("weight") + "bias")
        layer = torch.nn.Linear(
            tensors[name].shape[1], tensors[name].shape[0], bias=bias is not None
        )
        with torch.no_grad():
            layer.weight.copy_(tensors[name])
            if bias is not None:
                layer.bias.copy_(bias)
        layers += [torch.nn.ReLU(), layer] if layers else [layer]
    return torch.nn.Sequential(*layers).requires_grad_(False)
