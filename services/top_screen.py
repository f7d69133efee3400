"""The screen of `tandem top`."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Header, Static

from services.admin_client import AdminClient, AdminFailed
from services.top import picture

_SECONDS = 1.0


class Top(App[None]):
    """Draws the cluster once a second. What fails is told, and asked again."""

    TITLE = "tandem top"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("q", "quit", "Quit")]
    CSS = "#state { padding: 1 2; }"

    def __init__(self, client: AdminClient) -> None:
        super().__init__()
        self._client = client

    def compose(self) -> ComposeResult:
        """One text between head and foot."""
        yield Header(show_clock=True)
        yield VerticalScroll(Static("asking the cluster", id="state"))
        yield Footer()

    async def on_mount(self) -> None:
        """Begins."""
        self.set_interval(_SECONDS, self.refresh_state)
        await self.refresh_state()

    async def refresh_state(self) -> None:
        """Asks and draws."""
        try:
            live = await asyncio.to_thread(self._client.live)
        except AdminFailed as error:
            self.sub_title = str(error)
            return
        self.sub_title = live.cluster
        self.query_one("#state", Static).update(picture(live))
