"""A world around a ledger for property tests: workers that deliver late, twice, wrongly or never, and a learner.

Every sampled row says in its own tokens which version wrote it and in which draw, and every verdict names the draw it
judged: ages and pairings are read from the data, never from the ledger's own books."""

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction

from prefixrl.common.config.algorithm import AdmissionRule
from prefixrl.common.journal.records import AnswerKept, Record
from prefixrl.common.wire.messages.groups import GroupPrefixes, Prompt, Sampling, ScoredGroup
from prefixrl.common.wire.packing import token_ids
from prefixrl.learner.broker.groups.admission import Admission
from prefixrl.learner.broker.groups.answers import KeptAnswers
from prefixrl.learner.broker.groups.drafts import DraftedPrompts, Drafts
from prefixrl.learner.broker.groups.filtering import AccuracyFilter, Starved
from prefixrl.learner.broker.groups.ledger import Ledger
from prefixrl.learner.broker.groups.outcomes import Outcomes
from prefixrl.learner.broker.groups.states import LedgerLimits, PromptSource, SampleItem, ScoreItem
from prefixrl.learner.broker.groups.window import Choice, NotYetChosen, Window
from support import messages

DRAFT_SAMPLING = Sampling(temperature=0.0, max_new_tokens=8)


class Places:
    """Ten problems, in order, over and over."""

    def __init__(self, places: int | None) -> None:
        self.total = places

    def prompt(self, place: int) -> Prompt:
        return Prompt(f"p{place % 10}", f"{place % 10} ?", "1", source=self.source(place))

    def problem(self, place: int) -> int:
        return place % 10

    def is_ready(self, place: int) -> bool:
        return True

    def source(self, place: int) -> str:
        return "odd" if place % 2 else "even"


@dataclass
class Shape:
    """The shape of a run."""

    batch_groups: int
    max_staleness: int
    groups_per_item: int
    iterations: int | None
    places: int | None
    over_sampling: Fraction = Fraction(1)
    passing: int | None = None
    """With a filter: the draws, modulo 10, below this pass; None: no filter."""
    limit_groups: int = 10**6
    """Judged groups of which one must pass."""
    admission: AdmissionRule = "as_early_as_allowed"
    min_ess: float = 0.8
    fills: bool = False
    """`filter.fill = "prioritise"`."""
    has_drafts: bool = False
    """The adapter reads a draft of every problem, which scorers make."""
    is_by_outcome: bool = False
    """`data.sampling = "by_outcome"`."""


@dataclass
class World:
    """See the module text. `make` builds the ledger under test."""

    shape: Shape
    make: type[Ledger] = Ledger
    make_drafts: type[Drafts] = Drafts
    completed: int = 0
    records: list[Record] = field(default_factory=list)
    sampling: list[SampleItem] = field(default_factory=list)
    scoring: list[ScoreItem] = field(default_factory=list)
    answers: list[AnswerKept] = field(default_factory=list)
    """The journal of the drafts."""
    drafting: list[ScoreItem] = field(default_factory=list)
    late_drafts: list[ScoreItem] = field(default_factory=list)
    """Drafts whose lease was given up: they may still arrive."""
    ghosts: list[tuple[GroupPrefixes, ...]] = field(default_factory=list)
    """Prefixes whose lease was given up: they may still arrive, scored or not."""
    trained: dict[int, tuple[int, ...]] = field(default_factory=dict)
    draws: int = 0
    over: bool = False
    is_changed: bool = False
    """True if the length of the run was changed."""
    starved: Starved | None = None

    def __post_init__(self) -> None:
        self.load_drafts()
        self.ledger = self._new()

    def load_drafts(self) -> None:
        """A broker reads the drafts that are on the disk."""
        kept = KeptAnswers("target", has_advice=True, keeps_evaluations=True)
        kept.restore(self.answers)
        self.drafts = self.make_drafts(kept, DRAFT_SAMPLING, 1, 2)
        self.prompts: PromptSource = Places(self.shape.places)
        if self.shape.has_drafts:
            self.prompts = DraftedPrompts(self.prompts, self.drafts)

    def _new(self) -> Ledger:
        shape = self.shape
        limits = LedgerLimits(shape.groups_per_item, 2, 2)
        window = Window(
            shape.batch_groups, shape.max_staleness, shape.over_sampling, shape.iterations
        )
        band = AccuracyFilter(0.5, 1.0, shape.limit_groups, 0.0, fills=shape.fills)
        admission = Admission(window, shape.admission, shape.min_ess, shape.groups_per_item)
        band_or_none = None if shape.passing is None else band
        outcomes = Outcomes.of_run(1, 2, 10, shape.batch_groups) if shape.is_by_outcome else None
        return self.make(window, limits, self.prompts, band_or_none, admission, outcomes)

    # --- what scorers do before the adapter writes -------------------------------------------------------------------

    def start_draft(self) -> bool:
        """Ask for the drafts of the next groups, as the dispatcher does, and give one to a scorer."""
        if not self.shape.has_drafts:
            return False
        places = [*self.ledger.unsampled_places, *self.ledger.upcoming]
        self.drafts.request_drafts(map(self.prompts.prompt, places), for_training=True)
        item = self.drafts.start_scoring(for_training=True)
        if item is None:
            return False
        key = self.drafts.answers.key(item.groups[0].prompt, DRAFT_SAMPLING)
        assert key not in {record.key for record in self.answers}, "asked for again"
        self.drafting.append(item)
        return True

    def deliver_draft(self, item: ScoreItem, error: bool = False) -> None:
        prefixes = item.groups[0]
        verdict = messages.verdict(
            0.0,
            status="error" if error else "no_gold",
            finish="error" if error else "eos",
            completion="" if error else draft_of(prefixes.prompt),
        )
        scored = messages.scored_group(prefixes, verdict, version=-1)
        self.drafts.take_scores([scored], prompt_tokens=3)
        self._sync()

    def lose_draft(self, item: ScoreItem, died: bool) -> None:
        self.late_drafts.append(item)
        self.drafts.give_back(item, died)
        self._sync()

    # --- what workers do ---------------------------------------------------------------------------------------------

    def start_sampling(self, version: int) -> bool:
        item = self.ledger.start_sampling(version)
        self._sync()
        if item is not None:
            assert item.seqs, "a task of nothing"
            self.check_admission(version)
            self._check_drafts(item)
            self.sampling.append(item)
        return item is not None

    def _check_drafts(self, item: SampleItem) -> None:
        """A group is begun with the draft of its problem, as the journal has it."""
        if not self.shape.has_drafts:
            return
        texts = {record.key: record.text for record in self.answers}
        for seq in item.seqs:
            prompt = self.prompts.prompt(self.ledger.prompt_index(seq))
            key = self.drafts.answers.key(prompt, DRAFT_SAMPLING)
            assert texts.get(key) == prompt.draft, "begun without its draft"
            assert prompt.draft in ("", draft_of(prompt)), "the draft of another problem"

    def sample(self, item: SampleItem) -> tuple[GroupPrefixes, ...]:
        places = {group.seq: group.prompt for group in self.ledger.live()}
        return tuple(
            self._draw(seq, places[seq], item.version) for seq in item.seqs if seq in places
        )

    def _draw(self, seq: int, place: int, version: int) -> GroupPrefixes:
        self.draws += 1
        drawn = messages.row([version, self.draws], version=version)
        return messages.group(seq, drawn, prompt=self.prompts.prompt(place), seed=seq)

    def deliver_prefixes(self, groups: tuple[GroupPrefixes, ...], sampled_s: float = 0.0) -> None:
        for version in {version_of(group) for group in groups}:
            same = [group for group in groups if version_of(group) == version]
            self.ledger.take_prefixes(same, version, f"d{version}", sampled_s)
        self._sync()

    def start_scoring(self) -> bool:
        item = self.ledger.start_scoring()
        if item is not None:
            self.scoring.append(item)
        return item is not None

    def deliver_scores(
        self, groups: tuple[GroupPrefixes, ...], error: bool = False, scoring_s: float = 0.0
    ) -> None:
        self.ledger.take_scores(
            [judged(group, error, self.passes(group), scoring_s) for group in groups]
        )
        self._sync()

    def passes(self, group: GroupPrefixes) -> bool:
        """True if a group is worth training: a property of the draw, equal for every scorer."""
        return self.shape.passing is None or draw_of(group) % 10 < self.shape.passing

    def lose(self, item: SampleItem | ScoreItem, died: bool) -> None:
        if isinstance(item, ScoreItem):
            self.ghosts.append(item.groups)
        else:
            self.ghosts.append(self.sample(item))
        self.ledger.give_back(item, died)
        self._sync()

    # --- what the learner does ---------------------------------------------------------------------------------------

    def ask(self) -> Choice | NotYetChosen | Starved | None:
        """Ask for the next batch."""
        is_new = self.completed not in self.ledger.batches
        may_form = self.ledger.may_form(self.completed)
        choice = self.ledger.batch(self.completed)
        assert may_form or isinstance(choice, NotYetChosen), "a batch was overlooked"
        self._sync()
        self.over = choice is None or isinstance(choice, Starved)
        if isinstance(choice, Starved):
            self.starved = choice
        if isinstance(choice, Choice):
            self._check_batch(choice, is_new)
        return choice

    def train(self) -> bool:
        """Ask for the next batch and train it if there is one."""
        choice = self.ask()
        if not isinstance(choice, Choice):
            return False
        self.ledger.trained(self.completed)
        self.trained[self.completed] = choice.seqs
        self.completed += 1
        return True

    def _check_batch(self, choice: Choice, is_new: bool) -> None:
        iteration, shape = self.completed, self.shape
        before = self.trained.get(iteration)
        assert before in (None, choice.seqs), (
            f"iteration {iteration} was trained on {before}, now {choice.seqs}"
        )
        for group in self.ledger.results(choice.seqs):
            version = version_of(group.prefixes)
            assert iteration - version <= shape.max_staleness, (
                f"age {iteration - version} from the tokens"
            )
            assert group.version == version
            passes = self.passes(group.prefixes)
            assert passes or shape.fills, "trained although the filter objects"
            has_others = is_new and self.ledger.states().get("scored")
            assert passes or not has_others, "a spare took the place of a group that passed"
            for row, verdict in zip(group.prefixes.rows, group.verdicts, strict=True):
                assert verdict.extracted == str(token_ids(row.tokens)[1]), (
                    "a verdict on other prefixes"
                )
        if shape.max_staleness == 0:
            assert list(choice.seqs) == sorted(choice.seqs)
        elsewhere = {
            seq for other, seqs in self.trained.items() if other != iteration for seq in seqs
        }
        assert not elsewhere & set(choice.seqs), "trained twice"

    def _sync(self) -> None:
        """Written down before anybody is told, as the server does."""
        self.records.extend(self.ledger.records)
        self.ledger.records.clear()
        self.answers.extend(self.drafts.answers.records)
        self.drafts.answers.records.clear()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        ledger, counts, shape = self.ledger, self.ledger.counts, self.shape
        live = list(ledger.live())
        assert ledger.states() == Counter(group.state for group in live), (
            "the counts are not those of the groups"
        )
        assert sum(counts.filtered_by_source.values()) == counts.filtered
        ended = counts.trained + counts.filtered + counts.failed + counts.expired
        assert counts.issued == ended + len(live)
        assert counts.trained == sum(len(self.trained[t]) for t in range(self.completed))
        # Groups whose batch is recorded have their iteration; the others share those after it.
        chosen = {seq for seqs in ledger.batches.values() for seq in seqs}
        first = self.completed + len(ledger.batches)
        due = [
            group.version + shape.max_staleness
            for group in live
            if group.version is not None
            and group.seq not in chosen
            and (shape.over_sampling == 1 or group.state == "scored")
        ]
        for until in range(first - 1, max(due, default=0) + 1):
            fits = shape.batch_groups * (until - first + 1)
            assert sum(last <= until for last in due) <= fits, (
                f"more groups due by {until} than can be trained"
            )
        if shape.over_sampling == 1 and not self.is_changed:
            assert "expired: surplus" not in counts.causes
        if shape.passing in (None, 10):
            assert not counts.filtered
        self.drafts.check()
        total = self.drafts.total
        assert total.requests == len({record.key for record in self.answers}) == len(self.answers)
        assert total.prompt_tokens == sum(record.prompt_tokens for record in self.answers)

    def check_admission(self, version: int) -> None:
        """Check the cap on groups under way after one was given out at `version`."""
        shape = self.shape
        states = Counter(group.state for group in self.ledger.live())
        under_way = states["sampling"] + states["sampled"] + states["scoring"] + states["spare"]
        chosen = self.completed + len(self.ledger.batches)
        needed = (
            shape.batch_groups * (version + shape.max_staleness + 1 - chosen) - states["scored"]
        )
        assert under_way <= -(-shape.over_sampling * needed // 1), "more under way than the cap"


def draft_of(prompt: Prompt) -> str:
    """The target's draft of a problem."""
    return f"a draft of {prompt.prompt_id}"


def version_of(group: GroupPrefixes) -> int:
    """The version that wrote a group, from its tokens."""
    return int(token_ids(group.rows[0].tokens)[0])


def draw_of(group: GroupPrefixes) -> int:
    """The draw that made a group, from its tokens."""
    return int(token_ids(group.rows[0].tokens)[1])


def judged(
    prefixes: GroupPrefixes, error: bool = False, is_right: bool = True, scoring_s: float = 0.0
) -> ScoredGroup:
    """A verdict per row that names the draw it judged."""
    status = "error" if error else "ok"
    verdicts = [
        messages.verdict(float(is_right), status=status, extracted=str(token_ids(prefix.tokens)[1]))
        for prefix in prefixes.rows
    ]
    return messages.scored_group(
        prefixes,
        *verdicts,
        version=version_of(prefixes),
        weights_digest="d",
        scoring_s=scoring_s,
    )
