"""The budget of pixels that are decoded at a time."""

import threading

import pytest
from PIL import Image

from opal_deploy.predict import decoder_pool as pool_module
from opal_deploy.predict.decode_budget import FairSemaphore
from opal_deploy.predict.types import InferenceOptions
from tests.bright import wait_until
from tests.predict.prepared import INPUT, code, open_decoders, prepare_all


class Holder(threading.Thread):
    """Claims pixels and holds them until `done` is set."""

    def __init__(self, budget, *claims):
        super().__init__(daemon=True)
        self.budget, self.claims = budget, claims
        self.has, self.done = threading.Event(), threading.Event()
        self.start()

    def run(self):
        with self.budget.lease() as claim:
            for pixels in self.claims:
                claim(pixels)
            self.has.set()
            self.done.wait(30)


def test_pixels_are_granted_in_turn_and_a_huge_image_is_alone():
    budget = FairSemaphore(10)
    # a second claim replaces the first
    first, second = Holder(budget, 10, 4), Holder(budget, 5)
    assert first.has.wait(30)
    assert second.has.wait(30)
    huge = Holder(budget, 1000)
    wait_until(lambda: len(budget._waiting) == 1)
    # it would fit, and does not overtake
    late = Holder(budget, 1)
    wait_until(lambda: len(budget._waiting) == 2)
    first.done.set()
    first.join(30)
    assert not huge.has.is_set()
    assert not late.has.is_set()
    second.done.set()
    assert huge.has.wait(30)
    assert not late.has.is_set()
    huge.done.set()
    assert late.has.wait(30)
    late.done.set()


@pytest.mark.parametrize("isolate", [False, True])
def test_large_images_are_decoded_one_at_a_time(tmp_path, monkeypatch, isolate):
    monkeypatch.setattr(pool_module, "PIXELS_PER_WORKER", 3_000_000)
    free = []
    acquire = FairSemaphore.acquire

    def record(budget, pixels):
        taken = acquire(budget, pixels)
        free.append(budget._free)
        return taken

    monkeypatch.setattr(FairSemaphore, "acquire", record)
    # in a row of tiny images
    sizes = [(5000, 1000), (20, 10), (9000, 1000), (5000, 1000), (20, 10), (5000, 1000)]
    paths = [tmp_path / f"{number}.png" for number in range(len(sizes))]
    for path, size in zip(paths, sizes, strict=True):
        Image.new("1", size).save(path)
    options = InferenceOptions(workers=2, isolate=isolate)
    assert [code(one) for one in prepare_all(open_decoders(options, INPUT, rows=6), paths)] == [None] * 6
    # only the large ones claim, and the largest has all
    assert sorted(free) == [0, 1_000_000, 1_000_000, 1_000_000]
