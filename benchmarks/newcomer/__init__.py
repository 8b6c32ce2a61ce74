"""Three tasks as a new user makes them, for `benchmarks.own_tasks`.

    tasks.py     questions, openings and answers
    teach.py     their models: adapters as narrow as a first own model, from their libraries' default initialisation

Nothing in them was chosen after a run of training had been seen, and they share no values with the shipped examples."""
