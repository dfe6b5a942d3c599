"""Parameters and operations of backbones and heads, counted in the paper's convention and in ours."""
