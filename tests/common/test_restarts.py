"""A child has so many restarts, and all of them again after an hour in which it ran well."""

from prefixrl.common.host.process import WELL_S, RestartBudget


def test_a_process_that_ran_well_has_all_its_restarts_again() -> None:
    budget = RestartBudget(10, used=9, started_s=1000.0)
    assert budget.use_restart(now_s=1010.0)
    budget.started_s = 1010.0
    assert not budget.use_restart(now_s=1010.0 + WELL_S - 1)
    assert budget.use_restart(now_s=1010.0 + WELL_S)
    assert budget.used == 1


def test_a_process_without_restarts_is_never_started_again_soon() -> None:
    assert not RestartBudget(0, started_s=5.0).use_restart(now_s=6.0)
