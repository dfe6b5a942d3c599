"""Parameters and operations of backbones and heads, in the paper's convention and in ours."""
