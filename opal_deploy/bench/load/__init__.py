"""Load and faults for `opal-deploy serve`, by locust: users who send photographs, and others who mean it harm.

    python -m opal_deploy.bench.load soak --model best.onnx --images photographs/ --seconds 600 --out soak.json

`locustfile` has the users, and `hostile` what the harmful ones send; `server` starts the server and watches its memory;
`scenarios` puts them together, and `analysis` makes figures of what each request got. Answers are compared with those
of `opal-deploy infer` for the same files, which runs first.
"""
