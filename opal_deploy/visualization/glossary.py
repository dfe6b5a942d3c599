"""The words of an explanation, in plain sentences: tooltips on pages, and the glossary of the documentation."""

GLOSSARY: dict[str, str] = {
    "cell": (
        "One square of the grid into which the network divides an image, such as 7 x 7 squares. "
        "The network measures its features once per cell."
    ),
    "box": (
        "The rectangle of the image that a cell covers. "
        "It shows where a score was read; the network also sees pixels around it."
    ),
    "prototype": (
        "A fixed direction in the space of the network's features that stands for one part of one class. "
        "Training does not move prototypes: the network learns to match them."
    ),
    "slot": (
        "The place of one prototype in its class: with five prototypes per class, every class has the slots 0 to 4. "
        "For each image, a slot looks for its part and takes the one cell that matches best."
    ),
    "score": (
        "How strongly a slot responds at its best cell, usually from 0 (not at all) to 1. "
        "In every cell the slots of all classes compete, so a high score means that few others responded there."
    ),
    "cosine": (
        "How well the image as a whole matches a class: 1 is a perfect match, 0 none. "
        "The class with the largest cosine is the prediction; the cosine is not a probability."
    ),
    "contribution": (
        "The part of a class's cosine that comes from one slot. "
        "The contributions of a class's slots add up to its cosine, unless the model uses another distance than the "
        "default."
    ),
    "margin": (
        "By how much the predicted class's cosine exceeds that of the runner-up. Below 0.1 the answer is a close call."
    ),
    "close call": (
        "An answer whose margin is below 0.1. Whether it would hold without its strongest slot is said separately: it "
        "would if the margin exceeds that slot's contribution."
    ),
    "norm of the scores": (
        "The length of the vector of all slots' scores: how strongly the whole model responds to an image. "
        "It falls where no slot finds its part, as in blurred or foreign images."
    ),
    "ood score": (
        "How unlike the training images an image is: identical features score 0, unrelated ones about 1. "
        "An image with a high score may belong to none of the classes."
    ),
    "evidence": (
        "What the prediction is computed from: the slots of the predicted class, each with its cell, box, score and "
        "contribution. It comes from the same computation as the prediction and is not added afterwards."
    ),
    "atlas": (
        "A page with the training images' patches at which each slot responded most strongly. "
        "It shows what a slot stands for."
    ),
}
