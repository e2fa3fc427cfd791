import pytest
import torch

from . import tiny


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))
