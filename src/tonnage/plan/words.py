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
    "buffers": ("buffers, logits", "缓冲区、logits"),
    "fragmentation": ("lost between tensors", "显存碎片"),
    "context": ("driver, kernels, NCCL", "驱动、内核与 NCCL"),
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
    "size": ("size", "大小"),
    "timeline title": ("one step, a row a stage", "一步的时间线，每行一段"),
    "shown of": ("the first {shown} micro-batches are drawn", "图中为前 {shown} 个微批次"),
    "event F": ("forward", "前向"),
    "event B": ("backward", "反向"),
    "event g": ("gradients or parameters", "梯度或参数"),
    "event optimizer": ("optimizer", "优化器"),
    "event send": ("a send that blocks", "阻塞发送"),
    "card holds": ("the line: a card has", "竖线：单卡显存"),
    "most by a card": ("sent by the busiest card", "最忙一卡的发送量"),
    "first": ("first stage", "首段"),
    "middle": ("middle stage", "中段"),
    "last": ("last stage", "末段"),
    "only": ("all alike", "各卡相同"),
    "nearest": (
        "does not fit; nearest that does: {changes} (--search finds the fastest)",
        "显存不足；最接近且放得下的改动：{changes}（--search 找最快的布局）",
    ),
    "nothing near": (
        "does not fit, and no layout near it does: --search says more, or use more cards",
        "显存不足，附近也没有放得下的布局：用 --search 查看，或增加卡数",
    ),
    "cluster": ("cluster", "集群"),
    "days": ("days", "天数"),
    "card hours": ("card hours", "卡时"),
    "cost": ("cost", "费用"),
    "cheapest first": ("clusters that are in time, cheapest first", "按期完成的集群，最省在前"),
    "no prices": (
        "no prices given (--price h100=2.5): ranked by card hours",
        "未给价格（--price h100=2.5）：按卡时排序",
    ),
    "slowest nic": ("slowest NIC that costs at most {loss}", "耗时最多增加 {loss} 的最慢网卡"),
    "any nic": ("any, nothing is sent between hosts", "任意，主机之间不传数据"),
    "a card": ("a card", "（每卡）"),
    "searched": (
        "{considered} layouts; {large} need more memory; {dropped} cut by bounds",
        "共 {considered} 种布局；{large} 种显存不足；{dropped} 种被下界剪去",
    ),
    "measured": (
        "measured {measured}, predicted {predicted} ({error})",
        "实测 {measured}，预测 {predicted}（{error}）",
    ),
    "not the links": (
        "computation alone takes as long as that: the links are not what bounds it",
        "仅计算就需要这么久：瓶颈不在链路",
    ),
    "implied": (
        "{size} of {group} over {link} in the {left} that computation leaves: {rate}, {share} of the line",
        "计算之外的 {left} 内经 {link} 传输 {group} 的 {size}：{rate}，为线速的 {share}",
    ),
    "implausible": (
        "no healthy {link} is that slow: look for NCCL_P2P_DISABLE, sockets in place of InfiniBand "
        "(NCCL_DEBUG=INFO), or a card that throttles",
        "正常的 {link} 不会这么慢：检查 NCCL_P2P_DISABLE、是否用套接字代替了 InfiniBand（NCCL_DEBUG=INFO），"
        "或显卡是否降频",
    ),
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
