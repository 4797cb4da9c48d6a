"""Stand-ins for vLLM and for servers, with which tools that compare them are tried. They are written into files."""

# The module of an engine. A step takes 5 ms, a token of a prompt 0.01 ms. Of four tokens of a request, a step with
# drafts gives three. A file `dies` in the model's folder says when the process dies.
ENGINE = """
import json, os, threading, time
from pathlib import Path
from types import SimpleNamespace

now = 0.0
time.perf_counter = lambda: now

def wait_until(holds):
    while not holds():
        time.sleep(0.01)

class SamplingParams:
    def __init__(self, **given):
        assert given["temperature"] <= 2 or __name__ != "vllm"
        self.max_tokens = given["max_tokens"]

class LLM:
    def __init__(self, model, **options):
        global now
        now += 30.0
        print("{not an answer")
        self.folder, self.drafts = Path(model), 0
        (self.folder / "options").write_text(json.dumps(options))
        (self.folder / "process").write_text(str(os.getpid()))
        dies = self.folder / "dies"
        self.dies = dies.read_text() if dies.exists() else ""
        if self.dies == "at the start":
            os._exit(1)
        if self.dies == "while another is measured":
            threading.Thread(target=self.die_late, daemon=True).start()

    def die_late(self):
        wait_until((self.folder.parent / "working").exists)
        os._exit(1)

    def generate(self, prompts, params, use_tqdm):
        global now
        if self.dies == "at work":
            os._exit(1)
        if self.dies == "after another":
            (self.folder.parent / "working").touch()
            other = (self.folder.parent / "other" / "process").read_text()
            wait_until(lambda: ") Z " in Path(f"/proc/{other}/stat").read_text())
        now += 1e-5 * sum(len(prompt["prompt_token_ids"]) for prompt in prompts) + 5e-3 * params[0].max_tokens
        self.drafts += sum(each.max_tokens // 4 for each in params)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7] * each.max_tokens)]) for each in params]

    def get_metrics(self):
        counts = {"drafts": self.drafts, "accepted_tokens": 2 * self.drafts}
        return [SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=count) for name, count in counts.items()]
"""

# `vllm.benchmarks.serve`, whose figures follow from the number of clients.
CLIENT = """
import asyncio, os
from pathlib import Path

def add_cli_args(parser):
    for name in ("backend", "base-url", "endpoint", "model", "tokenizer", "dataset-name", "temperature", "seed"):
        parser.add_argument(f"--{name}")
    for name in ("random-input-len", "random-output-len", "max-concurrency", "num-prompts"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--percentile-metrics")
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--disable-tqdm", action="store_true")

async def main_async(given):
    if os.environ.get("HANGS"):
        Path(os.environ["HANGS"]).touch()
        await asyncio.sleep(600)
    times = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms"), 1.5)
    return {"output_throughput": 10.0 * given.max_concurrency, "completed": given.num_prompts, "failed": 0, **times}
"""

# A server that answers /health.
SERVER = """
import json, os, sys
from pathlib import Path
from http.server import BaseHTTPRequestHandler, HTTPServer

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

words = sys.argv
if "--config" in words:
    served = json.loads(Path(words[words.index("--config") + 1]).read_text())["applications"][0]
    port = served["args"]["gateway"]["port"]
else:
    port = int(words[words.index("--port") + 1])
Path(sys.argv[0]).with_name(f"process.{os.getpid()}").touch()
HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""
