"""Masks as pycocotools writes and draws them."""

import numpy as np

from opal_deploy.datasets.masks import draw_segmentations

# pycocotools.mask.encode of the mask below
ENCODED = {"size": [20, 30], "counts": "01V38UM0000000000000000006J00000007I00000000000000n0"}


def test_pycocotools_run_lengths_are_read():
    mask = np.zeros((20, 30), np.bool_)
    mask[3:12, 5:20] = mask[10:18, 15:28] = mask[0, 0] = True
    assert (draw_segmentations([ENCODED], (20, 30)) == mask).all()


def test_several_segmentations_of_both_kinds_add_up():
    square = [[2.0, 14.0, 6.0, 14.0, 6.0, 18.0, 2.0, 18.0]]
    both = draw_segmentations([ENCODED, square], (20, 30))
    assert both.sum() - draw_segmentations([ENCODED], (20, 30)).sum() == draw_segmentations([square], (20, 30)).sum()
    assert both[14:18, 2:6].all()
