"""Chunks and their order: every image once, in order, whichever workers die and whatever finishes first."""

import itertools
import random
from pathlib import Path

import pytest

from opal_deploy.cluster.connection import ActorPlan, Node, plan_actors
from opal_deploy.errors import ImageError, StoppedEarly, UsageError
from opal_deploy.parallel.chunk import IN_FLIGHT, Chunk, ChunkResult, make_chunks
from opal_deploy.parallel.scheduler import _WINDOW, Scheduler, Worker
from opal_deploy.records.record import to_record
from opal_deploy.sources.image import FrameInfo, InputImage
from tests.records.test_schema import FAILED, OK

BATCH, SIZE = 4, 16


class Result(ChunkResult):
    def __init__(self, chunk):
        self.chunk = chunk

    def load(self):
        return [to_record({**OK, "image": request.name}) for request in self.chunk.requests]


class FakeWorker(Worker):
    def __init__(self, place):
        super().__init__("A fake", place, place)
        self.is_open = True

    def submit(self, chunk):
        self.chunks[object()] = chunk

    def kill(self):
        self.is_open = False


class Pool:
    """Workers that finish in any order, and die with the images that kill them, or for no reason."""

    def __init__(self, count, killers, seed, lost=0.0):
        self._random, self._killers, self._lost = random.Random(seed), killers, lost
        self._count, self.workers, self.deaths, self._started = count, list[FakeWorker](), 0, 0

    def maintain(self):
        while len(self.workers) < self._count:
            self._started += 1
            self.workers.append(FakeWorker(f"{self._started % 2}"))

    def wait(self, seconds):
        busy = [worker for worker in self.workers if worker.chunks]
        if not busy:
            return []
        worker = self._random.choice(busy)
        assert len(worker.chunks) <= IN_FLIGHT
        assert len(worker.chunks) == 1 or not any(chunk.deaths for chunk in worker.chunks.values())
        ref, chunk = self._random.choice(list(worker.chunks.items()))
        chunk = Chunk.from_bytes(chunk.to_bytes())
        kills = self._killers.intersection(range(chunk.first, chunk.first + len(chunk)))
        if kills or (not worker.chunks[ref].deaths and self._random.random() < self._lost):
            self.workers.remove(worker)
            self.deaths += 1
            return [(lost.count_death(worker.place), None) for lost in worker.chunks.values()]
        del worker.chunks[ref]
        return [(chunk, Result(chunk))]


def named(first, last):
    return (InputImage(f"{number}", f"{number}.png", index=number) for number in range(first, last))


def schedule(pool, requests, first=0):
    chunks = make_chunks(requests, first, SIZE, BATCH)
    scheduler = Scheduler(
        pool, chunks, first=first, size=SIZE, batch=BATCH,
        model_sha256="0" * 64,
    )  # fmt: skip
    return itertools.chain.from_iterable(result.load() for result in scheduler.run())


@pytest.mark.parametrize("seed", range(60))
def test_every_image_has_its_record_in_order(seed):
    rng = random.Random(seed)
    first = rng.randrange(40)
    last = first + rng.randrange(300)
    killers = {rng.randrange(first, last) for _ in range(rng.randrange(3)) if last > first}
    pool = Pool(rng.randrange(1, 5), killers, seed, lost=rng.choice([0, 0.2]))
    records = list(schedule(pool, named(first, last), first))
    assert [record.image for record in records] == [f"{number}" for number in range(first, last)]
    assert {int(record.image or "") for record in records if record.status == "error"} == killers


def test_a_chunk_is_tried_again_on_another_node():
    tried = []

    class Unlucky(Pool):
        def wait(self, seconds):
            for worker in self.workers:
                for chunk in worker.chunks.values():
                    if not chunk.first and len(tried) <= chunk.deaths:
                        tried.append(worker.place)
                        self._killers = {0} if len(tried) == 1 else set()
            return super().wait(seconds)

    # with one chunk, the other place's worker is free
    assert len(list(schedule(Unlucky(2, set(), 0), named(0, SIZE)))) == SIZE
    assert len(set(tried)) == 2


def test_a_slow_chunk_does_not_let_the_others_run_away():
    taken = 0

    class Slow(Pool):
        def wait(self, seconds):
            # the first chunk is finished when nothing else is left to do
            for worker in self.workers:
                for ref, chunk in list(worker.chunks.items()):
                    if chunk.first or all(len(w.chunks) == (w is worker) for w in self.workers):
                        return [(worker.chunks.pop(ref), Result(chunk))]
            raise AssertionError

    def requests():
        nonlocal taken
        for request in named(0, 5000):
            taken += 1
            yield request

    records = schedule(Slow(2, set(), 0), requests())
    next(records)
    assert taken == SIZE * _WINDOW * 2
    assert sum(1 for _ in records) == 4999


def test_an_error_of_the_inputs_comes_behind_all_records_before_it():
    def requests():
        yield from named(0, 50)
        raise UsageError("the list ends here")

    records = schedule(Pool(2, set(), 0), requests())
    assert sum(1 for _ in itertools.islice(records, 50)) == 50
    with pytest.raises(UsageError, match="ends here"):
        next(records)


def test_what_fails_on_a_second_worker_too_stops_the_run():
    class Full(Pool):
        def wait(self, seconds):
            worker = next(worker for worker in self.workers if worker.chunks)
            self.workers.remove(worker)
            error = StoppedEarly("the disk is full")
            return [(chunk.count_death(worker.place), error) for chunk in worker.chunks.values()]

    with pytest.raises(StoppedEarly, match="disk is full"):
        list(schedule(Full(2, set(), 0), named(0, 50)))


def test_chunks_travel_with_all_that_is_known_of_an_image():
    frame = FrameInfo(Path("a.mp4"), 5, 0.5, "0" * 64)
    request = InputImage("a", b"bytes", (1, 2, 3, 4), "ash", ImageError("bad_box", "no pixel"), 7, frame=frame)
    (back,) = Chunk.from_bytes(Chunk(3, (request,)).to_bytes()).requests
    assert (back.name, back.source, back.crop, back.label, back.index) == ("a", b"bytes", (1, 2, 3, 4), "ash", 7)
    assert back.frame == frame
    assert (back.error.code, str(back.error)) == ("bad_box", "no pixel")


def test_chunks_of_bytes_end_early():
    requests = (InputImage(f"{n}", bytes(9 << 20)) for n in range(20))
    sizes = [len(chunk) for chunk in make_chunks(requests, 2, SIZE, BATCH)]
    assert sizes == [10, 4, 6]


@pytest.mark.parametrize(
    ("nodes", "cpus", "plan"),
    [
        ([(8, 0), (2, 0)], None, ActorPlan(0, 2)),
        ([(64, 0), (0, 0)], None, ActorPlan(0, 4)),
        ([(64, 0)], 16, ActorPlan(0, 16)),
        ([(64, 8), (12, 2), (32, 0)], None, ActorPlan(1, 6)),
        ([(64, 8)], 8, ActorPlan(0, 8)),
        ([(0, 0)], None, None),
        ([(2, 0), (3, 0)], 4, None),
    ],
)
def test_actors_are_as_large_as_the_nodes_allow(nodes, cpus, plan):
    listed = [Node(f"{n}", f"10.0.0.{n}", *node) for n, node in enumerate(nodes)]
    if plan is not None:
        assert plan_actors(listed, cpus) == plan
        return
    with pytest.raises(UsageError, match="start nodes first"):
        plan_actors(listed, cpus)


def test_the_records_of_a_chunk_come_back_in_order():
    for label in ("oak", "\udcff"):
        documents = [{**OK, "label": label}, FAILED, OK]
        records = list(map(to_record, documents))
        assert ChunkResult.build(records).load() == records
