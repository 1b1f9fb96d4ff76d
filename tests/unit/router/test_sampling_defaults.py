"""What a checkpoint's generation_config.json says of sampling, where the request says nothing."""

import json
import shutil

import pytest

from disagg.errors import ConfigError

BODY = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}


def checkpoint_with(model_dir, directory, **defaults):
    copied = shutil.copytree(model_dir, directory / "model")
    file = copied / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | defaults))
    return copied


async def test_the_checkpoints_defaults_hold_where_a_request_says_nothing(
    open_house, model_dir, tmp_path
):
    defaults = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05}
    checkpoint = checkpoint_with(model_dir, tmp_path, repetition_penalty=1.1, **defaults)
    house = await open_house(checkpoint=checkpoint)
    worker = await house.add()
    said = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for body in (BODY, BODY | said):
        assert (await house.http.post("/v1/completions", json=body)).status_code == 200
    first, second = (submit.sampling for submit in worker.submits)
    assert {name: getattr(first, name) for name in defaults} == defaults
    assert first.repetition_penalty == 1.1
    assert (second.temperature, second.top_p, second.top_k, second.min_p) == (0, 1, 0, 0)
    assert second.repetition_penalty == 1


async def test_defaults_out_of_bounds_are_refused_at_start_up(open_house, model_dir, tmp_path):
    checkpoint = checkpoint_with(model_dir, tmp_path, repetition_penalty=0)
    with pytest.raises(ConfigError, match=r"generation_config.json: repetition_penalty"):
        await open_house(checkpoint=checkpoint)
