"""A scheduler in your hands: you choose which simulated rank goes next."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

from ringsim.errors import ArgumentError, Deadlock, PeerExited
from ringsim.launch.alone import run_alone
from ringsim.simulator.settings import Settings
from ringsim.traces.findings import Diagnosis
from ringsim.traces.standing import say_standing
from ringsim.traces.units import count
from ringsim.view.html import draw_still


class Exploration(NamedTuple):
    """The result of trying the orders of a program.

    Attributes:
        tried: the number of orders tried.
        left: the least number of orders left that may differ; 0 if every order was tried.
        order: the first order that failed, as a sequence of ranks, or None.
        error: the error of this order, or "".
    """

    tried: int
    left: int
    order: tuple[int, ...] | None = None
    error: str = ""

    def __repr__(self) -> str:
        """Returns the result in words."""
        tried = f"{count(self.tried, 'order')} tried"
        if self.order is not None:
            return f"{tried}; order {', '.join(map(str, self.order))} fails:\n{self.error}"
        if self.left:
            return f"no order failed: {tried}, of at least {self.tried + self.left:,}"
        return f"no order fails: {tried}, and every other order is equivalent to one of these"


class Scheduler:
    """Simulated ranks that halt before each operation until you let one of them go.

    Printing a scheduler lists what each rank does. A notebook also shows the picture so far. `play`
    shows a button for each rank.

    Attributes:
        order: the ranks that you have chosen so far.
        next: the next operation of each rank that may go, with its file and line.
        trace: the trace so far. Each choice takes 1 µs, and so does each message.
        error: the error that ended the run, or None.
    """

    def __init__(self, packed: bytes, settings: Settings) -> None:
        self._packed, self._settings = packed, settings
        self._go_to(())

    def step(self, *ranks: int) -> Scheduler:
        """Lets ranks go, one after another: each posts its operation and runs on to its next halt.

        Args:
            ranks: the ranks, each of which must be `possible` when its turn comes.

        Returns:
            This scheduler.

        Raises:
            ArgumentError: a rank is not possible.
        """
        for rank in ranks:
            if rank not in self.next:
                may_go = ", ".join(map(str, self.next)) or "none"
                raise ArgumentError(
                    f"rank must be one that may go ({may_go}), got {rank}. Use back() to undo."
                )
            self._go_to((*self.order, rank))
        return self

    def back(self) -> Scheduler:
        """Undoes the last choice, and returns this scheduler."""
        self._go_to(self.order[:-1])
        return self

    def explore(
        self, *, most: int = 100_000, seed: int = 0, limit_s: float | None = None
    ) -> Exploration:
        """Tries every order from the start, until one fails.

        Orders that differ only in operations that do not affect each other are tried once. Only two
        things depend on the order: which of several sends a recv from any source receives, and
        whether an operation is done when a rank calls ``is_completed``.

        Args:
            most: the most orders to try.
            seed: the seed of the sequence in which the orders are tried.
            limit_s: the time limit for each order, in seconds, or None for no limit.

        Returns:
            The number of orders ``tried``, the least number of orders that are ``left``, and the
            first ``order`` that fails, if any. Pass this order to `step` of a new scheduler.

        Raises:
            RunTimeout: the time limit was exceeded.
        """
        tried, left, how = self._run("exploration:explore_here", most, seed, limit_s)
        if how is None:
            return Exploration(tried, left)
        outcome = self._run("orders:run_here", *how, limit_s=limit_s)
        order = tuple(choice.rank for choice in outcome.more[1])
        return Exploration(tried, left, order, str(outcome.error))

    @property
    def possible(self) -> tuple[int, ...]:
        """The ranks that may go."""
        return tuple(self.next)

    @property
    def deadlock(self) -> Diagnosis | None:
        """The reason why ranks can never continue, with their circle, or None."""
        error = self.error
        return error.diagnosis if isinstance(error, Deadlock | PeerExited) else None

    @property
    def finished(self) -> bool:
        """Whether all ranks have returned."""
        return not self.next and self.error is None

    def play(self) -> Any:
        """Returns a widget for notebooks, with a button for each rank."""
        import ipywidgets

        shown = ipywidgets.HTML()
        names = [*(f"rank {rank}" for rank in range(self._settings.world_size)), "back"]
        buttons = [ipywidgets.Button(description=name) for name in names]

        def show() -> None:
            shown.value = self._repr_html_()
            for rank, button in enumerate(buttons[:-1]):
                button.disabled = rank not in self.next

        def press(button: Any) -> None:
            if button is buttons[-1]:
                self.back()
            else:
                self.step(buttons.index(button))
            show()

        for button in buttons:
            button.on_click(press)
        show()
        return ipywidgets.VBox([ipywidgets.HBox(buttons), shown])

    def __repr__(self) -> str:
        """Returns the choices, what each rank does, and the error if there is one."""
        states = {rank: f"may go: {operation}" for rank, operation in self.next.items()}
        order = ", ".join(map(str, self.order)) or "none"
        end = "" if self.error is None else f"\n{self.error}"
        return f"order so far: {order}\n{say_standing(self.trace, states)}{end}"

    def _repr_html_(self) -> str:
        picture = draw_still(self.trace) if self.deadlock is None else self.deadlock.picture_html()
        return f'<pre style="white-space: pre-wrap">{html.escape(repr(self))}</pre>{picture}'

    def _go_to(self, order: tuple[int, ...]) -> None:
        """Runs the worker again from its start, with the given choices."""
        outcome = self._run("orders:run_here", order, None, set())
        self.order, self.trace, self.error = order, outcome.trace, outcome.error
        self.next: dict[int, str] = outcome.more[0]

    def _run(self, function: str, *how: Any, limit_s: float | None = None) -> Any:
        run = *how, self._packed, self._settings
        return run_alone(f"ringsim.simulator.{function}", *run, limit_s=limit_s)
