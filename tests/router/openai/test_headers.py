"""Which headers a proxy passes on."""

from multidict import CIMultiDict, CIMultiDictProxy

from pdconn.router.openai.requests import OF_THE_ANSWER, keep_end_to_end


def kept(*pairs, also=frozenset()):
    return list(keep_end_to_end(CIMultiDictProxy(CIMultiDict(pairs)), also=also).items())


def test_what_belongs_to_the_message_is_kept_as_often_as_it_comes():
    pairs = [("Authorization", "Bearer x"), ("X-A", "1"), ("x-a", "2"), ("Cookie", "c=1")]
    assert kept(*pairs) == pairs


def test_what_belongs_to_a_connection_is_not():
    assert not kept(
        ("Host", "a"),
        ("Content-Length", "3"),
        ("TRANSFER-ENCODING", "chunked"),
        ("Keep-Alive", "timeout=5"),
        ("Upgrade", "h2c"),
        ("Expect", "100-continue"),
        ("Proxy-Authorization", "secret"),
        ("Date", "now"),
    )


def test_what_a_connection_header_names_goes_with_it():
    assert kept(("Connection", "close, X-Hop"), ("x-hop", "1"), ("X-End", "2")) == [("X-End", "2")]


def test_an_answer_keeps_what_describes_its_bytes():
    pairs = [("Content-Encoding", "gzip"), ("Content-Length", "3")]
    assert kept(*pairs, also=OF_THE_ANSWER) == pairs
    assert not kept(*pairs)
