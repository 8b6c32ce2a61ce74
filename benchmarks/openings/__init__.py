"""A second task: choose the opening of an answer that suits the question's first word.

    question   "flip cgad"                       one of eight first words, two for each of four operations; four letters
    prefix     "Read from the end:"              the adapter's, one of four openings if it is a good one
    answer     "Read from the end: dagc"         the target's: it does what the opening says, whatever the first word
    reward     0.25 per right letter             the share of the answer's letters that stand where the gold's do

What differs from the arithmetic example: adapter (GPT-2's architecture, byte-level BPE) and target (Llama's, a token
per character) share no tokenizer, so prefixes reach the target as text; rewards are fractions and come from a user's
function; a wrong opening may earn something; there is one optimiser step per batch, no KL, no entropy
bonus. The adapter was taught the four openings with equal shares whatever the question, so it begins by chance alone.

    problems.py  operations, questions, right answers
    reward.py    the reward function, named by the run file
    build.py     tokenizers and models from a seed, kept in a folder with the run file and the problems
    run.toml     a run of three daemons
    arms.py      one run in one process, by the product at an exact age or by the plain loop

Models, data, teaching and settings were fixed by runs without staleness alone, before any stale run was seen. The
condition: at a constant learning rate of 5e-4, from a reward of 0.3 to 0.4 to at least 0.65 within 300 iterations. Four
seeds went from 0.36 to 0.98, with a plateau of about 60 iterations in which they lean to the opening that pays best
without looking at the question. (With weights spread by GPT-2's own 0.02 the adapter stayed there for good.) Afterwards
only its table of positions was widened, for the 64 tokens of the product's probe; four seeds then ended at 0.99."""
