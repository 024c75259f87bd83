"""Workloads by name: three synthetic ones that differ in how heavy their KV is, and fits of public data sets.

Where the fits come from (tokens of SmolLM2's tokenizer, 49,152 entries; maximum likelihood, see `LogNormal.fit`):

* ``sharegpt``: first question and first answer of 10,700 conversations, the readable beginning of
  ShareGPT_V3_unfiltered_cleaned_split.json. Fitted by us. The real prompts have a heavier head and tail than any
  log-normal (median 36, mean 307 tokens against 55 and 230 of the fit). Answers: median 264, mean 305.
* ``humaneval``: the 164 prompts and reference solutions of HumanEval (Chen et al., arXiv:2107.03374). Fitted by us:
  prompts 122 / 139 (median / mean), solutions 48 / 59.
* ``longbench``: no texts were at hand, so the fit is to the published average lengths of LongBench's 14 English text
  tasks (Bai et al., arXiv:2308.14508, task.md of its repository): 7,096 words in the middle, sigma 0.56 between tasks,
  taken at 1.3 tokens per word. Lengths within a task vary too, so the real spread is larger. Outputs: the limits that
  its harness sets per task (dataset2maxlen.json), 32 to 512 tokens, an upper bound of real answers.
* ``openchat``: log-normals through median and 90th percentile of openchat_sharegpt4 in Table 2 of Sarathi-Serve
  (Agrawal et al., arXiv:2403.02310): prompts 1,730 / 5,696 with the conversation so far, outputs 415 / 834.

DistServe (Zhong et al., arXiv:2401.09670) evaluates on the first three sets, cut to 2,048 tokens for OPT; here nothing
is cut but what ``max_prompt`` says.
"""

from __future__ import annotations

from nanopd.bench.lengths import Lengths, LogNormal, Uniform
from nanopd.bench.workload import Part, Workload
from nanopd.errors import ConfigError

SHORT = Part(1.0, Uniform(64, 512), Uniform(64, 256))  # light KV: a chat turn
LONG = Part(1.0, Uniform(4096, 12_288), Uniform(64, 256))  # heavy KV: a document


def named_workload(name: str) -> Workload:
    """The workload of this name. Raises ConfigError, listing the names, if there is none."""
    found = {made.name: made for made in _all()}
    if name not in found:
        raise ConfigError(f"no workload is named {name!r}; there are {', '.join(sorted(found))}")
    return found[name]


def workload_names() -> list[str]:
    return sorted(made.name for made in _all())


def _all() -> list[Workload]:
    mixed = (Part(0.8, SHORT.prompt, SHORT.output), Part(0.2, LONG.prompt, LONG.output))
    return [
        Workload("short", (SHORT,), source="uniform: 64-512 in, 64-256 out"),
        Workload("long", (LONG,), source="uniform: 4,096-12,288 in, 64-256 out"),
        Workload("mixed", mixed, source="80 % short, 20 % long"),
        _log_normal("sharegpt", LogNormal(55.4, 1.688), LogNormal(206.8, 1.044), "our log-normal fit of ShareGPT"),
        _log_normal("humaneval", LogNormal(126.0, 0.448), LogNormal(45.7, 0.757), "our log-normal fit of HumanEval"),
        _log_normal(
            "longbench",
            LogNormal(7096 * 1.3, 0.559),
            LogNormal(86.1, 1.112),
            "log-normal through LongBench's published task averages and output limits",
        ),
        _log_normal(
            "openchat",
            LogNormal(1730, 0.930),  # ln(5696 / 1730) / 1.2816
            LogNormal(415, 0.545),  # ln(834 / 415) / 1.2816
            "log-normal through median and p90 of openchat_sharegpt4, Sarathi-Serve Table 2",
        ),
    ]


def _log_normal(name: str, prompt: Lengths, output: Lengths, source: str) -> Workload:
    return Workload(name, (Part(1.0, prompt, output),), source=source)
