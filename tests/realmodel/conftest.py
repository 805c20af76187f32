"""One tiny Qwen3 with random weights and one real vLLM engine of each dtype, started once for all tests."""

import pytest

from realmodel.engine import sampler, sync
from realmodel.engine.sampler import EngineConfig
from realmodel.policy import model as policy
from realmodel.policy import recipes
from tests.support.tiny_model import untrained


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    untrained().save_pretrained(path)
    recipes.char_tokenizer().save_pretrained(path)
    return path


@pytest.fixture
def model(folder):
    return policy.load(folder)[0]


@pytest.fixture(scope="session")
def engines(folder):
    """Engines by dtype, started when first asked for; several live together in one process, after numba was used."""
    import llvmlite.binding  # noqa: F401, an engine must start beside it

    started = {}

    def get(dtype: str):
        if dtype not in started:
            started[dtype] = sampler.start(folder, EngineConfig(dtype=dtype, max_model_len=192, max_num_seqs=64))
        return started[dtype]

    return get


@pytest.fixture
def engine(engines, model):
    """The float32 engine with the tiny model's original weights."""
    llm = engines("float32")
    sync.push(llm, model)
    return llm
