"""Questions in Chinese; a report, a conversation and a table to work on."""

from __future__ import annotations

from loadtest.traffic.kinds.genre import NUMBERS, Document, Genre

CHINESE = Genre(
    questions=(
        "请介绍一下$place的$thing有什么特色，预算$big元怎么安排$n天？",
        "我今年$n岁，想在$place学习$idea，每月$big元够吗？",
        "从$place到$other_place旅行$n天，想体验$thing，请安排行程，预算$big元。",
        "请用$n句话向$reader解释$idea，并举一个和$thing有关的例子。",
        "$thing在$place为什么受欢迎？请列出$n个理由，并估计年销售额是否超过$big万元。",
        "请比较$place和$other_place在$year年的$topic，差距有没有$n%？",
        "如何在家里为$n个人准备$thing？人均预算$m元，$reader也能学会吗？",
        "$idea会怎样影响$place的$topic？请给$reader写$big字以内的说明。",
        "$year年$n月之后，$place的$topic有哪些变化？$reader应该注意什么？",
        "学习$idea需要$n个月还是$m个月？我在$place，是$reader，请推荐教材。",
    ),
    documents=(
        Document(
            "请总结下面这份关于$place$topic的报告，并提出三条建议。\n\n",
            (
                "$year年，$place的$topic比上一年$trend了$n.$cents%，其中$thing贡献了$big万元。\n",
                "调查显示，$m%的$reader认为$idea很重要，但只有$n%的人了解它的原理。\n",
                "与$other_place相比，本地的$thing价格高出$n元，主要原因是$reason。\n",
                "专家建议在$hour点以后开放$n个新场所，预计可以服务$big名$reader。\n",
                "第$index项工作由$surname主任负责，计划投入$big万元，用于$thing和$idea的推广。\n",
            ),
            kept=("place", "topic"),
        ),
        Document(
            "以下是$place一家商店的客服对话记录。\n\n",
            (
                "顾客：你好，我买的$thing（订单$code$big）已经等了$n天，为什么还没到？\n",
                "客服：$surname女士您好，非常抱歉，因为$reason，预计还需要$n天。\n",
                "顾客：那可以退款吗？一共是$big元，当时还用了$m元的优惠券。\n",
                "客服：可以的，请在$hour:$minute之前提交申请，编号是$code-$other_big。\n",
            ),
            "\n请找出顾客最不满意的地方，并替客服写一段道歉的话。\n",
        ),
        Document(
            "请分析下面的表格：哪个城市的增长最快？为什么？\n\n"
            "| 城市 | 商品 | 年份 | 销售额（万元） | 增长 |\n| --- | --- | --- | --- | --- |\n",
            ("| $place | $thing | $year | $big.$cents | $n.$m% |\n",),
        ),
    ),
    words={
        **NUMBERS,
        "place": (
            "北京", "成都", "西安", "杭州", "广州", "苏州", "南京", "重庆", "昆明", "青岛", "厦门",
            "哈尔滨", "武汉", "长沙", "大连", "桂林",
        ),
        "other_place": (
            "上海", "深圳", "天津", "洛阳", "贵阳", "福州", "拉萨", "三亚", "兰州", "扬州",
        ),
        "thing": (
            "火锅", "绿茶", "太极拳", "豆腐", "饺子", "中药", "月饼", "书法", "围棋", "京剧",
            "汤圆", "刺绣", "陶瓷", "米粉", "剪纸", "古琴", "皮影戏", "粽子", "普洱茶", "糖葫芦",
        ),
        "idea": (
            "光合作用", "通货膨胀", "人工智能", "相对论", "区块链", "量子计算", "供求关系",
            "进化论", "温室效应", "机器翻译", "复利", "免疫系统", "板块运动", "博弈论", "基因编辑",
        ),
        "topic": (
            "房价", "空气质量", "公共交通", "旅游收入", "人口结构", "教育资源", "生活成本",
            "就业情况", "老旧小区改造", "夜间经济", "垃圾分类", "养老服务",
        ),
        "reader": (
            "小学生", "退休老人", "大学生", "外国游客", "程序员", "新手父母", "农民", "出租车司机",
            "店主", "护士",
        ),
        "reason": (
            "运输成本上升", "天气原因", "仓库正在搬迁", "原材料短缺", "节日订单太多", "系统升级",
            "人手不足", "质量检查不合格",
        ),
        "trend": ("增长", "下降", "上升", "减少"),
        "surname": tuple("王李张刘陈杨赵黄周吴徐孙马朱胡郭何林"),
    },
)  # fmt: skip
