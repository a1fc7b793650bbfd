"""What LongBench asks and how it scores, one entry per data set.

Prompts, lengths and metrics are those of ``config/dataset2prompt.json``,
``config/dataset2maxlen.json`` and ``eval.py`` of THUDM/LongBench (MIT), character for character:
"asconcisely" is theirs. Source: Bai et al., arXiv:2308.14508.
"""

# ruff: noqa: RUF001 (Chinese punctuation)

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DataSet:
    """One data set of LongBench.

    Attributes:
        prompt: template with ``{context}`` once, and ``{input}`` at most once, after it.
        max_new_tokens: longest answer.
        metric: a name in ``longbench_metrics.METRICS``.
        language: "en", "zh" or "code".
        extended: it is also part of LongBench-E.
        few_shot: the prompt shows solved examples; only an answer's first line counts.
        stop: strings that end an answer, though not as its first token.
    """

    prompt: str
    max_new_tokens: int
    metric: str
    language: str = "en"
    extended: bool = False
    few_shot: bool = False
    stop: tuple[str, ...] = ()

    @property
    def chat(self) -> bool:
        """Whether a chat model is asked in its chat template. Prompts that are to be continued,
        examples and code, are put to it as they are."""
        return not self.few_shot and self.language != "code"


_PASSAGES = (
    "Answer the question based on the given passages. Only give me the answer and do not "
    "output any other words.\n\nThe following are given passages.\n{context}\n\n"
    "Answer the question based on the given passages. Only give me the answer and do not "
    "output any other words.\n\nQuestion: {input}\nAnswer:"
)

# hotpotqa, 2wikimqa and musique ask alike.
_MULTI_HOP = DataSet(_PASSAGES, 32, "qa_f1", extended=True)

DATASETS: Mapping[str, DataSet] = {
    "narrativeqa": DataSet(
        "You are given a story, which can be either a novel or a movie script, and a "
        "question. Answer the question asconcisely as you can, using a single phrase if "
        "possible. Do not provide any explanation.\n\nStory: {context}\n\n"
        "Now, answer the question based on the story asconcisely as you can, using a single "
        "phrase if possible. Do not provide any explanation.\n\nQuestion: {input}\n\nAnswer:",
        128,
        "qa_f1",
    ),
    "qasper": DataSet(
        "You are given a scientific article and a question. Answer the question as concisely "
        "as you can, using a single phrase or sentence if possible. If the question cannot "
        'be answered based on the information in the article, write "unanswerable". If the '
        'question is a yes/no question, answer "yes", "no", or "unanswerable". Do not '
        "provide any explanation.\n\nArticle: {context}\n\n"
        " Answer the question based on the above article as concisely as you can, using a "
        "single phrase or sentence if possible. If the question cannot be answered based on "
        'the information in the article, write "unanswerable". If the question is a yes/no '
        'question, answer "yes", "no", or "unanswerable". Do not provide any explanation.\n\n'
        "Question: {input}\n\nAnswer:",
        128,
        "qa_f1",
        extended=True,
    ),
    "multifieldqa_en": DataSet(
        "Read the following text and answer briefly.\n\n{context}\n\n"
        "Now, answer the following question based on the above text, only give me the answer "
        "and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
        "qa_f1",
        extended=True,
    ),
    "multifieldqa_zh": DataSet(
        "阅读以下文字并用中文简短回答：\n\n{context}\n\n"
        "现在请基于上面的文章回答下面的问题，只告诉我答案，不要输出任何其他字词。\n\n"
        "问题：{input}\n回答：",
        64,
        "qa_f1_zh",
        language="zh",
    ),
    "hotpotqa": _MULTI_HOP,
    "2wikimqa": _MULTI_HOP,
    "musique": replace(_MULTI_HOP, extended=False),
    "dureader": DataSet(
        "请基于给定的文章回答下述问题。\n\n文章：{context}\n\n"
        "请基于上述文章回答下面的问题。\n\n问题：{input}\n回答：",
        128,
        "rouge_zh",
        language="zh",
    ),
    "gov_report": DataSet(
        "You are given a report by a government agency. Write a one-page summary of the "
        "report.\n\nReport:\n{context}\n\nNow, write a one-page summary of the report.\n\n"
        "Summary:",
        512,
        "rouge",
        extended=True,
    ),
    "qmsum": DataSet(
        "You are given a meeting transcript and a query containing a question or "
        "instruction. Answer the query in one or more sentences.\n\nTranscript:\n"
        "{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more "
        "sentences.\n\nQuery: {input}\nAnswer:",
        512,
        "rouge",
    ),
    "multi_news": DataSet(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        512,
        "rouge",
        extended=True,
    ),
    "vcsum": DataSet(
        "下面有一段会议记录，请你阅读后，写一段总结，总结会议的内容。\n会议记录：\n"
        "{context}\n\n会议总结：",
        512,
        "rouge_zh",
        language="zh",
    ),
    "trec": DataSet(
        "Please determine the type of the question below. Here are some examples of "
        "questions.\n\n{context}\n{input}",
        64,
        "classification",
        extended=True,
        few_shot=True,
    ),
    "triviaqa": DataSet(
        "Answer the question based on the given passage. Only give me the answer and do not "
        "output any other words. The following are some examples.\n\n{context}\n\n{input}",
        32,
        "qa_f1",
        extended=True,
        few_shot=True,
    ),
    "samsum": DataSet(
        "Summarize the dialogue into a few short sentences. The following are some "
        "examples.\n\n{context}\n\n{input}",
        128,
        "rouge",
        extended=True,
        few_shot=True,
        stop=("\n",),
    ),
    "lsht": DataSet(
        "请判断给定新闻的类别，下面是一些例子。\n\n{context}\n{input}",
        64,
        "classification",
        language="zh",
        few_shot=True,
    ),
    "passage_count": DataSet(
        "There are some paragraphs below sourced from Wikipedia. Some of them may be "
        "duplicates. Please carefully read these paragraphs and determine how many unique "
        "paragraphs there are after removing duplicates. In other words, how many "
        "non-repeating paragraphs are there in total?\n\n{context}\n\n"
        "Please enter the final count of unique paragraphs after removing duplicates. The "
        "output format should only contain the number, such as 1, 2, 3, and so on.\n\n"
        "The final answer is: ",
        32,
        "count",
        extended=True,
    ),
    "passage_retrieval_en": DataSet(
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine "
        "which paragraph the abstract is from.\n\n{context}\n\n"
        "The following is an abstract.\n\n{input}\n\n"
        "Please enter the number of the paragraph that the abstract is from. The answer "
        'format must be like "Paragraph 1", "Paragraph 2", etc.\n\nThe answer is: ',
        32,
        "retrieval",
        extended=True,
    ),
    "passage_retrieval_zh": DataSet(
        "以下是若干段落文字，以及其中一个段落的摘要。请确定给定的摘要出自哪一段。\n\n"
        "{context}\n\n下面是一个摘要\n\n{input}\n\n"
        '请输入摘要所属段落的编号。答案格式必须是"段落1"，"段落2"等格式\n\n答案是：',
        32,
        "retrieval_zh",
        language="zh",
    ),
    "lcc": DataSet(
        "Please complete the code given below. \n{context}Next line of code:\n",
        64,
        "code_sim",
        language="code",
        extended=True,
    ),
    "repobench-p": DataSet(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        64,
        "code_sim",
        language="code",
        extended=True,
    ),
}
