"""One run of `opal-deploy infer`: its folder, its records, what is made of them, and going on after an interruption."""
