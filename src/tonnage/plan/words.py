"""What tables and sentences of the planner say, in English and Chinese.

Names of collectives and dimensions stay English in both: people search logs for them.
"""

from __future__ import annotations

from typing import Literal

Language = Literal["en", "zh"]

_WORDS: dict[str, tuple[str, str]] = {
    "step": ("step", "每步"),
    "where the seconds go": ("where the seconds go", "时间去向"),
    "what moves": (
        "what a card of the fullest stage sends in a step (all stages: --json, --ledger)",
        "最满一段的单卡每步发送量（各段见 --json、--ledger）",
    ),
    "memory": ("memory of the fullest card", "最满一张卡的显存"),
    "timeline": (
        "one step (F forward, B backward, g gradients or parameters, o optimizer, s send, . waiting)",
        "一步的时间线（F 前向，B 反向，g 梯度或参数，o 优化器，s 发送，. 等待）",
    ),
    "compute": ("computation", "计算"),
    "tp": ("tensor parallel, exposed", "张量并行 tp 暴露通信"),
    "cp": ("context parallel, exposed", "上下文并行 cp 暴露通信"),
    "ep": ("expert parallel, exposed", "专家并行 ep 暴露通信"),
    "dp": ("gradients and parameters, exposed", "梯度与参数 dp 暴露通信"),
    "pp": ("pipeline sends, exposed", "流水线 pp 暴露发送"),
    "bubble": ("bubble", "流水线气泡"),
    "optimizer": ("optimizer", "优化器"),
    "other": ("other", "其他"),
    "weights": ("weights", "权重"),
    "gradients": ("gradients", "梯度"),
    "activations": ("activations", "激活"),
    "buffers": ("buffers, logits, context", "缓冲区、logits、上下文"),
    "total": ("total", "合计"),
    "part": ("part", "部分"),
    "seconds": ("time", "时间"),
    "share": ("share", "占比"),
    "rank": ("rank", "卡号"),
    "kind": ("what", "内容"),
    "op": ("collective", "集合通信"),
    "group": ("group", "通信组"),
    "link": ("link", "链路"),
    "calls": ("calls", "次数"),
    "nbytes": ("payload", "数据量"),
    "wire": ("sent", "实际发送"),
    "time": ("time", "耗时"),
    "exposed": ("exposed", "暴露"),
    "layout": ("layout", "布局"),
    "fits": ("fits", "放得下"),
    "does not fit": ("does not fit", "放不下"),
    "change": ("what if", "改动"),
    "tokens": ("tok/s/card", "每卡 tok/s"),
    "against": ("change", "相对首行"),
    "held": ("memory", "显存"),
    "now": ("as planned", "原方案"),
    "best layouts": ("best layouts", "最佳布局"),
    "why": ("why the first wins over the second", "第一名为何胜过第二名"),
    "source": ("source", "来源"),
    "rows": ("rows", "行数"),
    "refused": ("refused", "拒绝"),
    "bias": ("bias", "偏差"),
    "worst": ("worst", "最差"),
    "baseline": ("baseline", "基线"),
    "working": ("working", "推导"),
}


def say(key: str, lang: Language) -> str:
    """The words for ``key`` in that language."""
    english, chinese = _WORDS[key]
    return chinese if lang == "zh" else english


LABELS_ZH = {
    "sequence parallel": "序列并行",
    "tensor parallel": "张量并行",
    "embedding": "嵌入",
    "head": "输出层",
    "loss": "损失",
    "gradients": "梯度",
    "gradients of experts": "专家梯度",
    "gradients, across shards": "梯度（分片组间）",
    "gradients of experts, across shards": "专家梯度（分片组间）",
    "parameters": "参数",
    "parameters of experts": "专家参数",
    "pipeline": "流水线",
    "experts: dispatch and combine": "专家分发与合并",
    "ring: keys and values": "环：键值",
    "ring: their gradients": "环：键值梯度",
    "Ulysses: heads": "Ulysses：注意力头",
    "tied embedding": "共享嵌入的梯度",
}
"""Chinese for the labels of a plan's rows."""
