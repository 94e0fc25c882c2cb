"""Patterns of the values of `format`."""

_DAYS = (
    r"(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))|"
    r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"{_HEX}(?::{_HEX}){{7}}", f"::(?:{_HEX}(?::{_HEX}){{0,6}})?"]
    + [f"{_HEX}(?::{_HEX}){{{n - 1}}}::(?:{_HEX}(?::{_HEX}){{0,{6 - n}}})?" for n in range(1, 7)]
)
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_CHARS = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_REST = rf"{_CHARS}{{0,150}}(?:\?{_CHARS}{{0,150}})?(?:#{_CHARS}{{0,150}})?"
_URI = rf"[A-Za-z][A-Za-z0-9+.-]{{0,20}}:(?://{_HOST}(?::[0-9]{{1,4}})?(?:/{_REST})?|[A-Za-z0-9]{_REST})"
_ATOM = r"[A-Za-z0-9_+-]{1,32}"

FORMATS: dict[str, str] = {
    "date": _DAYS,
    "time": _TIME,
    "date-time": rf"{_DAYS}T{_TIME}",
    "duration": r"P(?:[0-9]{1,4}D(?:T[0-9]{1,4}H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?)?|"
    r"T[0-9]{1,4}(?:H(?:[0-9]{1,4}M(?:[0-9]{1,4}S)?)?|M(?:[0-9]{1,4}S)?|S)|[0-9]{1,4}W|[0-9]{1,3}Y(?:[0-9]{1,3}M(?:[0-9]{1,4}D)?)?|[0-9]{1,3}M(?:[0-9]{1,4}D)?)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_LABEL}(?:\.{_LABEL}){{0,2}}\.[A-Za-z]{{2,10}}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "base64": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|(?:/[A-Za-z0-9]{_REST})?)",
    "json-pointer": r"(?:/(?:[A-Za-z0-9_. -]|~[01])*)*",
    "relative-json-pointer": r"(?:0|[1-9][0-9]{0,5})(?:#|(?:/(?:[A-Za-z0-9_. -]|~[01])*)*)",
    "uri-template": r"(?:[A-Za-z0-9._~:/-]|\{[A-Za-z0-9_]+\})*",
}
"""Each for the whole text. They match what every common parser takes, which is less than the standards allow."""

ANY_TEXT = frozenset({"password", "binary", "path", "file-path", "directory-path", "markdown"})
"""Formats that say how a text is shown or read, without a rule for its characters."""

ANY_NUMBER = frozenset({"float", "double", "decimal"})
INTEGERS = {
    f"{sign}int{bits}": (-(2 ** (bits - 1)) if not sign else 0, 2 ** (bits - (not sign)) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
