"""The words of an explanation, in plain sentences: tooltips on pages, and the glossary of the documentation."""

GLOSSARY: dict[str, str] = {
    "cell": (
        "One square of the grid into which the network divides an image, such as 7 x 7 squares. "
        "The network measures its features once per cell."
    ),
    "box": (
        "The rectangle of the image that a cell covers. "
        "It shows where a score was read. The network also sees pixels around it, a transformer the whole image."
    ),
    "prototype": (
        "A fixed direction in the network's feature space that stands for one part of one class. "
        "The network learns to match it."
    ),
    "slot": (
        "The place of one prototype in its class. "
        "With five prototypes per class, every class has the slots 0 to 4. "
        "In each image, a slot takes the one cell that matches its prototype best."
    ),
    "score": (
        "How strongly a slot responds at its best cell, usually from 0 (not at all) to 1. "
        "In every cell the slots of all classes compete, so a high score means that few others responded there."
    ),
    "cosine": (
        "How well the whole image matches a class: 1 is a perfect match, 0 none. "
        "The class with the largest cosine is the prediction. The cosine is not a probability."
    ),
    "contribution": (
        "The part of a class's cosine that comes from one slot. "
        "With the default distance, the contributions of a class's slots add up to its cosine."
    ),
    "margin": ("The predicted class's cosine minus that of the runner-up. Below 0.1 the answer is a close call."),
    "close call": (
        "An answer whose margin is below 0.1. "
        "It would hold without its strongest slot if the margin exceeds that slot's contribution. "
        "This is said separately."
    ),
    "norm of the scores": (
        "The length of the vector of all slots' scores: how strongly the whole model responds to an image. "
        "It falls where no slot finds its part, as in blurred or foreign images."
    ),
    "ood score": (
        "How unlike the training images an image is. Identical features score 0, unrelated ones about 1. "
        "An image with a high score may be out of distribution (OOD)."
    ),
    "evidence": (
        "What the prediction is computed from: the slots of the predicted class, "
        "each with its cell, box, score and contribution. "
        "It comes from the same computation as the prediction."
    ),
    "atlas": (
        "A page with the training images' patches at which each slot responded most strongly. "
        "It shows what a slot stands for."
    ),
}
