"""Records against what a model computes, and two models or results against each other."""
