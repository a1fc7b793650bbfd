"""Small operations on the pages of an engine run on one thread, the compiled kernels on all."""

from __future__ import annotations

import threading

import pytest
import torch

from kvsketch.kernels import native
from kvsketch.kernels.native import one_thread
from kvsketch.page.schedule import Rhythm
from kvsketch.vllm import pages
from tests.serving.served import Served, drawn

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    if native._openmp() is None:
        pytest.skip("torch has an OpenMP library of its own")
    yield
    torch.set_num_threads(before)


def test_few_numbers_take_one_thread_and_the_kernels_two():
    with one_thread(1000, CPU):
        assert (torch.get_num_threads(), native.threads()) == (1, 2)
        with one_thread(1000, CPU):
            assert (torch.get_num_threads(), native.threads()) == (1, 2)
        assert (torch.get_num_threads(), native.threads()) == (1, 2)
    assert (torch.get_num_threads(), native.threads()) == (2, 2)
    torch.set_num_threads(1)
    assert native.threads() == 1


@pytest.mark.parametrize(("numbers", "device"), [(1 << 21, "cpu"), (1000, "meta")])
def test_many_numbers_and_other_devices_take_all_threads(numbers, device):
    with one_thread(numbers, torch.device(device)):
        assert (torch.get_num_threads(), native.threads()) == (2, 2)


def test_an_error_gives_the_threads_back():
    with pytest.raises(ValueError, match="wrong"), one_thread(1000, CPU):
        raise ValueError("wrong")
    assert (torch.get_num_threads(), native.threads()) == (2, 2)


def test_another_thread_keeps_its_own():
    found = []
    with one_thread(1000, CPU):
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert found == [2]


def test_pages_of_an_engine_are_compressed_on_one_thread(monkeypatch):
    found, compress = [], pages.compress

    def seen(*args, **kwargs):
        found.append((torch.get_num_threads(), native.threads()))
        return compress(*args, **kwargs)

    monkeypatch.setattr(pages, "compress", seen)
    served = Served("heavy_merge", Rhythm(40, 10), 4)
    served.step([(0, 0, list(drawn(0, 60)))])
    assert found
    assert set(found) == {(1, 2)}
