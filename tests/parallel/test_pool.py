"""The pool of worker processes of a run: what it does with a process that ends while it has nothing to do."""

from contextlib import closing

import psutil

from opal_deploy.parallel.chunk import Chunk
from opal_deploy.parallel.pool import ProcessWorkerPool
from opal_deploy.parallel.worker import ChunkTask
from opal_deploy.predict.types import InferenceOptions
from opal_deploy.run.run import RunOptions
from opal_deploy.sources.image import InputImage
from opal_deploy.workers.worker import WorkerConfig
from tests.bright import BrightSession, wait_until


def open_sessions():
    return [BrightSession()]


def children():
    return [child for child in psutil.Process().children() if "workers.worker" in " ".join(child.cmdline())]


def collect(pool, done):
    done += pool.wait(0.1)
    return done


def test_an_idle_process_that_is_killed_is_replaced_and_no_chunk_is_blamed(tmp_path, make_pictures):
    images = [InputImage(path.name, path) for path in make_pictures(tmp_path, 3)]
    config = WorkerConfig(ChunkTask(open_sessions, batch=2), pillow_limit=None, predicts=True)
    lines, done = [], []
    with closing(ProcessWorkerPool([("cpu", config)], lines.append)) as pool:
        assert pool.open() == [("brightness on CPU", 2)]
        pool.begin(RunOptions(tmp_path, InferenceOptions(batch=2, workers=1), log=print))
        (child,) = children()
        child.kill()
        wait_until(lambda: collect(pool, done) or pool.num_lost)
        assert lines == ["A worker process was ended by SIGKILL"]
        pool.maintain()
        wait_until(lambda: collect(pool, done) or pool.workers[0].is_open)
        for number, image in enumerate(images):
            pool.workers[0].submit(Chunk(number, (image,)))
        wait_until(lambda: len(collect(pool, done)) == 3)
        times = pool.close()
    assert {chunk.first: (chunk.deaths, result.load()[0].image) for chunk, result in done} == {
        number: (0, image.name) for number, image in enumerate(images)
    }
    assert times[0].sum_stage("decode").calls == 3
    assert children() == []
