"""Sentences of the advice and of the verdict, in English and Chinese; names of options stay as people search them."""

from __future__ import annotations

from typing import Literal

Language = Literal["en", "zh"]

_WORDS: dict[str, tuple[str, str]] = {
    "straggler": (
        "rank {rank} loses {seconds} a step at its own pace{entered}: look at its host, data loading, clocks{others}",
        "rank {rank} 按自身节奏每步慢 {seconds}{entered}：检查其主机、数据加载与频率{others}",
    ),
    "entered": (" (it comes into the trace {seconds} late)", "（进入跟踪时已晚 {seconds}）"),
    "others": ("; then ranks {ranks}", "；其次是 rank {ranks}"),
    "fuse": (
        "join the {count} small all-reduces of a step in one buffer{unknown}",
        "把每步 {count} 个小的 all-reduce 合并到一个缓冲区{unknown}",
    ),
    "unknown": (" (the trace gives no sizes)", "（跟踪中没有大小）"),
    "bucket": (
        "send gradients in buckets of about {size} (bucket_cap_mb in DDP)",
        "梯度按约 {size} 分桶发送（DDP 的 bucket_cap_mb）",
    ),
    "wire": (
        "send {count} transfers a step in bf16 instead of {dtype}",
        "每步 {count} 个传输改用 bf16（现为 {dtype}）",
    ),
    "early": (
        "start {count} transfers a step when their input is ready: the host asks late",
        "每步 {count} 个传输应在输入就绪时开始：主机发起过晚",
    ),
    "overlap": (
        "let computation run beside transfers: at most this much",
        "让计算与传输重叠：最多可省这些",
    ),
    "sync": (
        "drop host waits (.item(), .cpu(), synchronize): {count} a step",
        "去掉主机等待（.item()、.cpu()、synchronize）：每步 {count} 次",
    ),
    "slow": (
        "{count} transfers took longer than others of their kind and size: look at that link",
        "{count} 个传输比同类同大小的更慢：检查对应链路",
    ),
    "link": ("links of twice the bandwidth", "链路带宽加倍"),
    "no transfers": (
        "No communication in this trace: a step takes {step}, and nothing is moved between ranks.",
        "跟踪中没有通信：每步 {step}，各 rank 之间没有传输。",
    ),
    "waits": (
        "Waiting, not the network: {share} of the time in collectives is waiting for the last rank; "
        "rank {rank} is last in {times} of {all}.",
        "是等待，不是网络：集合通信时间的 {share} 在等最后到达的 rank；rank {rank} 在 {all} 次中有 {times} 次最后到达。",
    ),
    "waits evenly": (
        "{share} of the time in collectives is waiting for other ranks, and no one rank causes it.",
        "集合通信时间的 {share} 在等其他 rank，且并非由某一个 rank 造成。",
    ),
    "moves": (
        "Moving bytes: {share} of the time in collectives is transfer; {exposed} of a step is exposed.",
        "主要在传输：集合通信时间的 {share} 为传输；每步有 {exposed} 没有被计算掩盖。",
    ),
    "one rank": (
        "Communication with no computation beside it takes {exposed} of a step of {step}. One rank's trace "
        "doesn't tell waiting from moving: give those of the others, too.",
        "每步 {step} 中有 {exposed} 的通信没有与计算重叠。单个 rank 的跟踪无法区分等待与传输：请一并给出其他 rank 的跟踪。",
    ),
    "hidden": (
        "Communication lies beside computation: {exposed} of a step of {step} is exposed.",
        "通信与计算重叠：每步 {step} 中只有 {exposed} 暴露。",
    ),
    "largest gain": (
        "Largest gain by replay: {text}; saves {saved} of {step}.",
        "重放得出的最大收益：{text}；每步 {step} 可省 {saved}。",
    ),
    "no gain": ("No change that was replayed saves half a percent.", "没有任何重放的改动能省下 0.5 %。"),
    "high": ("high", "高"),
    "medium": ("medium", "中"),
    "low": ("low", "低"),
    "where": ("a mean step of a mean rank", "平均每步、平均每个 rank"),
    "part": ("part", "部分"),
    "time": ("time", "时间"),
    "share": ("of step", "占比"),
    "step": ("step", "每步"),
    "compute": ("computation", "计算"),
    "communication": ("communication", "通信"),
    "exposed": ("  exposed", "  暴露"),
    "waiting": ("  waiting for ranks", "  等待其他 rank"),
    "collectives": ("collectives, a step and rank", "集合通信（每步、每 rank）"),
    "op": ("op", "操作"),
    "ranks": ("ranks", "rank 数"),
    "calls": ("calls", "次数"),
    "bytes": ("bytes", "字节"),
    "wait": ("wait", "等待"),
    "busbw": ("bus bw", "总线带宽"),
    "last": ("who came last", "谁最后到达"),
    "rank": ("rank", "rank"),
    "times": ("times", "次数"),
    "caused": ("waiting caused", "造成的等待"),
    "advice": ("what would save time, by replay of all ranks", "可省时间的做法（重放所有 rank 得出）"),
    "saves": ("saves", "可省"),
    "sure": ("sure", "可信度"),
    "do": ("what to do", "做法"),
    "what-if": ("what if", "假设"),
    "change": ("change", "改动"),
    "note": ("note", "说明"),
    "measured": ("measured", "实测"),
    "before": ("before", "之前"),
    "after": ("after", "之后"),
    "lanes title": ("Tonnage trace", "Tonnage 跟踪"),
    "kind compute": ("computation", "计算"),
    "kind copy": ("copy", "拷贝"),
    "kind waiting": ("waiting for ranks", "等待其他 rank"),
    "kind moving": ("moving bytes", "传输"),
    "kind communication": ("communication (waiting not told)", "通信（无法区分等待）"),
}


def trace_words(key: str, lang: Language) -> str:
    """The words for ``key`` in that language."""
    english, chinese = _WORDS[key]
    return chinese if lang == "zh" else english
