"""What a search chooses from."""

from gapless.plan.search import choices
from gapless.schedule.recipes import RECIPES


def test_the_planner_tries_every_recipe_with_a_flush_but_the_slowest_and_the_searched_ones() -> None:
    flushed = {name for name, recipe in RECIPES.items() if recipe.synchronous}
    assert set(choices.RECIPES) == flushed - {"naive", "auto", "optimal"}
