"""A second task, the letters example (`deploy/examples/letters`), with settings of the benchmark's own.

    run.toml     one optimiser step per batch at a constant rate, no KL, no entropy bonus, a greedy target
    arms.py      one run in one process, by the product at an exact age or by the plain loop

Models, data, teaching and settings were fixed by runs without staleness alone, before any stale run was seen. The
condition: at a constant learning rate of 5e-4, from a reward of 0.3 to 0.4 to at least 0.65 within 300 iterations. Four
seeds went from 0.36 to 0.98, with a plateau of about 60 iterations in which they lean to the opening that pays best
without looking at the question. (With weights spread by GPT-2's own 0.02 the adapter stayed there for good.) Afterwards
only its table of positions was widened, for the 64 tokens of the product's probe; four seeds then ended at 0.99."""
