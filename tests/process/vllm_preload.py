"""What the vLLM engine imports, for processes that are forked after it: it takes ten seconds."""

from disagg.workers.engines.vllm import start

start.set_environment("cpu", 1)
start.import_vllm()
