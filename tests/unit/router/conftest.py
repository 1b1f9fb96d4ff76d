"""A checkpoint's tokenizer, shared by the router's tests."""

import pytest

from disagg.router.tokenizer import Tokenizer
from tests.checkpoints import make_checkpoint


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), "qwen3", num_layers=1, max_position_embeddings=512
    )


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer(model_dir)
