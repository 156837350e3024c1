"""Summaries of rows: numbers against hand counts, text against the tokenizer, HTML by parsing it."""

import copy
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from posttrain.errors import DataError
from posttrain.extensions.page.inspect import FILE_TOKENS, Bin, Piece, elide, pieces_of, summarise, to_console, to_html
from posttrain.types import Finding, Row
from posttrain.values import visible
from tests.wordings import raises

BOS, EOS = 1, 2


def row_of(*sizes, prompt=0, trained=None):
    """Completions of the given sizes, made of token 50, after a prompt of token 51."""
    masks = [[1] * size if trained is None else [0] * (size - trained) + [1] * trained for size in sizes]
    return Row([51] * prompt, [[50] * size for size in sizes], masks)


def chat_row(tokenizer, question, answer):
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    ids = [*tokenizer(answer, add_special_tokens=False)["input_ids"], EOS]
    return Row(tokenizer(text, add_special_tokens=False)["input_ids"], [ids], [[1] * len(ids)])


FINDING = Finding("DATA-TEST", "error", "2 of 3 rows <b>break</b>", "rows 0, 1", "because & so.", "mend it.")


# Numbers --------------------------------------------------------------------------------------------------------------


def test_lengths_trained_tokens_and_truncation_are_counted_by_sequence(tiny_tokenizer):
    rows = [row_of(4, prompt=6, trained=3), row_of(2, 8, prompt=2, trained=1), row_of(20)]
    summary = summarise(rows, tiny_tokenizer, limit=10)
    assert (summary.rows, summary.sequences, summary.tokens) == (3, 4, 10 + 4 + 10 + 20)
    assert summary.trained_tokens == 3 + 1 + 1 + 19, "the first token of a row without prompt has no predictor"
    assert summary.trained_share == pytest.approx(24 / 44)
    assert (summary.truncated, summary.truncated_share) == (3, 0.75)
    assert summary.lengths == {"min": 4, "median": 10, "mean": 11, "p95": 20, "max": 20}
    assert not summary.prompts_only


def test_a_known_count_of_cut_rows_is_shown_instead_of_those_as_long_as_the_limit(tiny_tokenizer):
    summary = summarise([row_of(10), row_of(10), row_of(9)], tiny_tokenizer, limit=10, truncated=1)
    assert summary.truncated == 1
    assert "1 sequences (33.3%) at the limit of 10 tokens" in printed(summary)


def test_the_95th_percentile_is_the_value_that_95_of_100_do_not_exceed(tiny_tokenizer):
    rows = [row_of(size) for size in range(1, 101)]
    assert summarise(rows, tiny_tokenizer).lengths["p95"] == 95


@pytest.mark.parametrize("sizes", [[5], [3, 3, 3], [1, 100], list(range(1, 60)), [7, 8, 8, 19]])
def test_the_histogram_covers_every_length_once(tiny_tokenizer, sizes):
    bins = summarise([row_of(size) for size in sizes], tiny_tokenizer).histogram
    assert [sum(b.low <= size <= b.high for b in bins) for size in sizes] == [1] * len(sizes)
    assert [b.count for b in bins] == [sum(b.low <= size <= b.high for size in sizes) for b in bins]
    assert (bins[0].low, bins[-1].high) == (min(sizes), max(sizes))
    assert len(bins) <= 12


def test_padding_share_is_that_of_batches_padded_to_their_longest(tiny_tokenizer):
    rows = [row_of(1), row_of(9)]
    assert summarise(rows, tiny_tokenizer, batch_size=2).padding_share == pytest.approx(8 / 18)
    assert summarise(rows, tiny_tokenizer, batch_size=1).padding_share == 0
    pairs = [row_of(2, 6, prompt=2)]
    assert summarise(pairs, tiny_tokenizer, batch_size=1).padding_share == pytest.approx(4 / 16)


def test_padding_is_measured_in_a_shuffled_order(tiny_tokenizer):
    """Sorted by length, batches of two would hold no padding at all; training does not read them sorted."""
    rows = [row_of(size) for size in range(1, 21) for _ in range(2)]
    share = summarise(rows, tiny_tokenizer, batch_size=2).padding_share
    assert 0.1 < share < 0.5


def test_duplicates_are_rows_beyond_the_first(tiny_tokenizer):
    assert summarise([row_of(3)] * 4 + [row_of(4), row_of(3, trained=1)], tiny_tokenizer).duplicates == 3


def test_prompts_alone_have_no_trained_share(tiny_tokenizer):
    summary = summarise([Row([BOS, 50], [], []), Row([50], [], [])], tiny_tokenizer)
    assert (summary.prompts_only, summary.tokens, summary.trained_tokens) == (True, 3, 0)
    text = printed(summary)
    assert "completions are sampled during training" in text
    assert "prompt only" in text
    assert "[[" not in text.replace("[[trained text]]", "")
    assert " trained " not in text.split("special tokens")[0].replace("trained text", "")


def test_empty_rows_are_shown_as_they_are_and_no_rows_are_refused(tiny_tokenizer):
    summary = summarise([Row([], [[]], [[]])], tiny_tokenizer)
    assert (summary.tokens, summary.padding_share, summary.trained_share) == (0, 0, 0)
    to_html(summary)
    with raises(DataError):
        summarise([], tiny_tokenizer)


def test_special_tokens_are_named_by_their_use_and_counted(tiny_tokenizer):
    rows = [Row([BOS, 50, EOS], [[50, EOS]], [[1, 1]]), Row([BOS, 50], [[50, EOS]], [[1, 0]])]
    summary = summarise(rows, tiny_tokenizer)
    special = {token.id: token for token in summary.special}
    eos = special[EOS]
    assert (eos.text, eos.role) == ("<|im_end|>", "eos, pad")
    assert (eos.total, eos.trained, eos.least, eos.most) == (3, 1, 1, 2)
    assert (special[BOS].role, special[BOS].total, special[BOS].trained) == ("bos", 2, 0)
    assert [token.id for token in summary.special] == [EOS, BOS]
    assert [(shown.bos, shown.eos) for shown in summary.shown] == [(1, 2), (1, 1)]


def test_a_missing_eos_is_listed_with_zero(tiny_tokenizer):
    special = {token.id: token.total for token in summarise([row_of(3)], tiny_tokenizer).special}
    assert special == {BOS: 0, EOS: 0}


def test_shown_rows_are_spread_over_the_list_with_all_their_completions(tiny_tokenizer):
    rows = [row_of(2, 3) for _ in range(10)]
    summary = summarise(rows, tiny_tokenizer, show=2)
    assert [(shown.row, shown.completion) for shown in summary.shown] == [(0, 0), (0, 1), (5, 0), (5, 1)]
    assert len(summarise(rows, tiny_tokenizer, show=99).shown) == 20


def test_summarising_changes_no_row(tiny_tokenizer):
    rows = [chat_row(tiny_tokenizer, "sum?", "2"), row_of(2, 3)]
    before = copy.deepcopy(rows)
    summarise(rows, tiny_tokenizer)
    assert rows == before


# Pieces ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["What is the sum?", "naïve 日本 👩‍👩‍👧 end", "  two  spaces\n\n\tand tabs ", "é", ""])
def test_pieces_join_to_the_text_and_hold_every_token_once(tiny_tokenizer, text):
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = list(pieces_of(ids, [True] * len(ids), tiny_tokenizer, {}))
    assert "".join(piece.text for piece in pieces) == text
    assert [i for piece in pieces for i in piece.ids] == ids
    assert not any("\ufffd" in piece.text for piece in pieces)


def test_pieces_keep_the_space_of_a_sentencepiece_word():
    """Decoded alone, such a token loses the space in front of it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "</s>", "▁the", "▁sky"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    assert tokenizer.decode([3]) == "sky"
    pieces = list(pieces_of([2, 3, 2], [True] * 3, tokenizer, {}))
    assert [piece.text for piece in pieces] == ["the", " sky", " the"]


def test_a_character_is_never_shown_across_the_border_of_training(tiny_tokenizer):
    ids = tiny_tokenizer("é", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    pieces = list(pieces_of(ids, [False, True], tiny_tokenizer, {}))
    assert [(piece.ids, piece.trained) for piece in pieces] == [((ids[0],), False), ((ids[1],), True)]


def test_ids_outside_the_vocabulary_are_shown_as_what_they_are(tiny_tokenizer):
    summary = summarise([Row([50], [[-100, 99999, 50]], [[1, 1, 1]])], tiny_tokenizer)
    assert [p.text for p in summary.shown[0].pieces][1:3] == ["[id -100]", "[id 99999]"]
    to_html(summary)


def test_invisible_and_dangerous_characters_are_written_out():
    assert visible("a\x1b[2Jb\r\u202ec\u200b\ud800\U000e0041") == ("a\\x1b[2Jb\\x0d\\u202ec\\u200b\\ud800\\U000e0041")
    assert visible("tab\tline\nünï 日本 👩‍👧") == "tab\tline\nünï 日本 👩‍👧"


def test_elide_counts_the_tokens_it_leaves_out():
    pieces = [Piece(str(i), (i, i), False) for i in range(10)]
    head, hidden, tail = elide(pieces, 6)
    assert ([p.text for p in head], hidden, [p.text for p in tail]) == (["0", "1"], 8, ["6", "7", "8", "9"])
    assert elide(pieces, 10) == (pieces, 0, [])


# Terminal -------------------------------------------------------------------------------------------------------------


def printed(summary, **kwargs):
    out = io.StringIO()
    to_console(summary, Console(file=out, width=200, **kwargs))
    return out.getvalue()


def test_without_colours_trained_text_stands_in_brackets(tiny_tokenizer):
    text = printed(summarise([chat_row(tiny_tokenizer, "What is 1 + 1?", "The sum is 2")], tiny_tokenizer))
    assert "[[The sum is 2<|im_end|>]]" in text
    assert text.count("[[The sum") == text.count("<|im_end|>]]") == 1
    assert "<|im_start|>user↵" in text


def test_with_colours_trained_text_and_special_tokens_have_styles_of_their_own(tiny_tokenizer):
    row = chat_row(tiny_tokenizer, "sum?", "two")
    text = printed(summarise([row], tiny_tokenizer), force_terminal=True, color_system="standard")
    assert "\x1b[1;32mtwo\x1b[0m\x1b[1;4;35m<|im_end|>\x1b[0m" in text
    assert "\x1b[2msum?\x1b[0m\x1b[2;35m<|im_end|>\x1b[0m" in text
    assert "[[" not in text


def test_rows_can_neither_style_nor_command_the_terminal(tiny_tokenizer):
    row = chat_row(tiny_tokenizer, "[bold red]x[/bold red] [/nothing]", "\x1b[2J\x07")
    text = printed(summarise([row], tiny_tokenizer, title="[red]t[/oops]"))
    assert "[bold red]x[/bold red] [/nothing]" in text
    assert "\\x1b[2J\\x07" in text
    assert "\x1b" not in text


def test_the_terminal_shows_numbers_and_findings(tiny_tokenizer):
    rows = [row_of(5, prompt=5), row_of(10)]
    text = printed(summarise(rows, tiny_tokenizer, limit=10, findings=[FINDING], title="my rows"))
    for part in ("my rows", "20", "2 sequences (100.0%) at the limit of 10 tokens", "70.0%", "0.0% if shuffled"):
        assert part in text, part
    for part in ("error DATA-TEST 2 of 3 rows", "where: rows 0, 1", "why: because & so.", "fix: mend it."):
        assert part in text, part
    assert "no finding" in printed(summarise(rows, tiny_tokenizer))


def test_the_middle_of_a_long_row_is_left_out_and_said_so(tiny_tokenizer):
    text = printed(summarise([row_of(1000)], tiny_tokenizer))
    assert "... 600 tokens omitted ..." in text


# HTML -----------------------------------------------------------------------------------------------------------------

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags nest, and collects attributes and the text of every span in a row."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.tags, self.pieces, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1][0] == "span" and "title" in self.open[-1][1]:
            self.pieces.append((data, self.open[-1][1].get("class", ""), self.open[-1][1]["title"]))


def test_the_page_is_one_well_formed_file_that_loads_nothing(tiny_tokenizer):
    row = chat_row(tiny_tokenizer, "see http://example.com/a.js", '<script src="//evil"></script>')
    page = to_html(summarise([row], tiny_tokenizer, findings=[FINDING], title="rows of <mine>"))
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert not [item for item in parsed.attributes if item[1] in ("src", "href", "action") or item[1].startswith("on")]
    style = re.search(r"<style>(.*?)</style>", page, re.S).group(1)
    assert "url(" not in style and "@import" not in style
    assert ("meta", "charset", "utf-8") in parsed.attributes
    assert "rows of <mine>" in parsed.text


def test_the_page_is_made_for_light_and_dark(tiny_tokenizer):
    style = re.search(r"<style>(.*?)</style>", to_html(summarise([row_of(2)], tiny_tokenizer)), re.S).group(1)
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    names = set(re.findall(r"(--[\w-]+):", light)) - {"--tone"}
    assert names == set(re.findall(r"(--[\w-]+):", dark.split("}")[0])), "a colour has no dark counterpart"
    assert "color-scheme: light" in light and "color-scheme: dark" in dark


def test_the_page_marks_exactly_the_trained_tokens_and_names_the_special_ones(tiny_tokenizer):
    row = chat_row(tiny_tokenizer, "What is 1 + 1?", 'a < b & "c"\nis é')
    parsed = Page(to_html(summarise([row], tiny_tokenizer)))
    trained = "".join(text for text, kind, _ in parsed.pieces if "t" in kind.split())
    assert trained.replace("↵\n", "\n") == 'a < b & "c"\nis é<|im_end|>'
    everything = "".join(text for text, _, _ in parsed.pieces).replace("↵\n", "\n")
    assert everything == tiny_tokenizer.decode(row.prompt_ids + row.completions[0])
    special = [(text, label) for text, kind, label in parsed.pieces if "s" in kind.split()]
    assert special[0] == ("<|im_start|>", "1: bos")
    assert special[-1] == ("<|im_end|>", "2: eos, pad")


def test_the_page_shows_findings_with_their_severity_and_escapes_them(tiny_tokenizer):
    page = to_html(summarise([row_of(2)], tiny_tokenizer, findings=[FINDING]))
    assert '<section class="finding error">' in page
    assert "<b>break" not in page
    text = Page(page).text
    for part in (FINDING.code, FINDING.what, FINDING.where, FINDING.why, FINDING.fix):
        assert part in text
    assert "No findings: the checks found no problems" in Page(to_html(summarise([row_of(2)], tiny_tokenizer))).text


def test_bars_are_proportional_to_their_counts(tiny_tokenizer):
    rows = [row_of(2)] * 4 + [row_of(3)] + [row_of(5)] * 2
    page = to_html(summarise(rows, tiny_tokenizer))
    assert re.findall(r'class="bar" style="width: ([\d.]+)%"', page) == ["100.0", "25.0", "50.0"]


def test_a_very_long_row_does_not_make_a_very_long_page(tiny_tokenizer):
    parsed = Page(to_html(summarise([row_of(5000)], tiny_tokenizer)))
    assert len(parsed.pieces) == FILE_TOKENS
    assert "3,000 tokens omitted" in parsed.text


def test_the_page_can_be_written_whatever_the_rows_hold(tiny_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(type(tiny_tokenizer), "decode", lambda self, ids, **kw: "a\ud800" * len(ids))
    page = to_html(summarise([row_of(3)], tiny_tokenizer, title="\udcff"))
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    assert "\\ud800" in page


def test_a_few_far_longer_rows_do_not_squeeze_the_histogram(tiny_tokenizer):
    lengths = [*range(20, 120), *range(20, 120), 5000]
    summary = summarise([Row([], [[5] * n], [[1] * n]) for n in lengths], tiny_tokenizer)
    assert summary.histogram[-1] == Bin(5000, 5000, 1)
    assert len(summary.histogram) == 13
    assert max(item.count for item in summary.histogram) < 30
    assert sum(item.count for item in summary.histogram) == len(lengths)
