"""`docs/models.md` and the reasons of refusals know every model that the cookbook names."""

import sys
from pathlib import Path

import pytest
from tinker_cookbook import model_info
from tinker_local.backend.families import FAMILIES, family_of
from tinker_local.backend.families.line_up import LINE_UP, NOT_SERVED
from tinker_local.types import UnsupportedError

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import models_page

TABLES = {
    "meta-llama": model_info.get_llama_info,
    "Qwen": model_info.get_qwen_info,
    "deepseek-ai": model_info.get_deepseek_info,
    "openai": model_info.get_gpt_oss_info,
    "moonshotai": model_info.get_moonshot_info,
    "zai-org": model_info.get_zai_info,
    "nvidia": model_info.get_nvidia_info,
    "thinkingmachines": model_info.get_thinkingmachines_info,
}


def test_every_name_of_the_cookbooks_table_has_an_architecture_and_what_is_not_served_a_reason() -> None:
    assert len(TABLES) == sum(
        name.startswith("get_") and name.endswith("_info") for name in vars(model_info)
    )  # none of its tables is missing here
    asked = {f"{owner}/{name}" for owner, table in TABLES.items() for name in table()}
    assert asked == {name for names in LINE_UP.values() for name in names}
    assert {*LINE_UP} <= {*FAMILIES, *NOT_SERVED}
    for model_type in {*NOT_SERVED} - {*FAMILIES}:
        with pytest.raises(UnsupportedError) as refused:
            family_of(model_type, "m")
        assert NOT_SERVED[model_type] in str(refused.value)


@pytest.mark.more
def test_the_page_of_models_is_current() -> None:
    assert models_page.PAGE.read_text() == models_page.page(), "run scripts/models_page.py"
