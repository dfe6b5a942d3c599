"""Who may use a server without a token: programs, and pages of the server itself, but no other site's pages.

A browser sends requests of any page to any address, and a page whose name was pointed at this machine after it loaded
(DNS rebinding) reads the answers too. Such requests carry the other page's name as their Host or Origin.
"""

from __future__ import annotations

from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from opal_deploy.server.options import ServeOptions

_SAFE_METHODS = ("GET", "HEAD")


class AllowedHosts:
    """The names in Host and Origin that are answered: this machine's, those of the options, and any IP address."""

    def __init__(self, options: ServeOptions) -> None:
        self._given = {name.lower() for name in options.allowed_host}
        self._names = {"localhost", options.host.lower(), *self._given}

    def find_problem(self, method: str, headers: Headers) -> str:
        """Return why a request may not be answered, or an empty string."""
        if "*" in self._given:
            return ""
        host, origin, site = headers.get("host"), headers.get("origin"), headers.get("sec-fetch-site")
        if host is not None and not self._is_ours(_name(f"//{host}")):
            return f"host {host[:80]!r} is not this server's; start it with --allowed-host NAME, or with a token"
        if origin is not None:
            if urlsplit(origin).netloc == host or _name(origin) in self._given:
                return ""
            return f"a page of {origin[:80]!r} may not use this server; start it with --allowed-host NAME, or a token"
        # a link to the page is no risk: only the page sees the answer
        followed = method in _SAFE_METHODS and headers.get("sec-fetch-mode") == "navigate"
        if site == "cross-site" and not followed:
            return "a page of another site may not use this server; start it with --allowed-host NAME, or a token"
        return ""

    def _is_ours(self, name: str) -> bool:
        try:
            # an address cannot be pointed elsewhere
            ip_address(name)
        except ValueError:
            return name in self._names or name.endswith(".localhost")
        return True


def _name(url: str) -> str:
    """Return the name or address in a URL in lower case, without a port; empty where there is none."""
    try:
        return (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return ""
