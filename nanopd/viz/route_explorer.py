"""RouteExplorer: turn the numbers of a machine, and watch where routing changes its mind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import ipywidgets as widgets
from matplotlib.figure import Figure

from nanopd.costmodel.hardware_profile import WHOLE, HardwareProfile, preset, preset_names
from nanopd.router.decision import Decision, Policy
from nanopd.router.policies import make_policy
from nanopd.router.situation import Situation, imagined_request
from nanopd.router.slo import SloAware
from nanopd.viz.live import LiveFigure
from nanopd.viz.route_map import RouteMap, draw_route_map
from nanopd.viz.style import bare_figure

LOADS = (*range(0, 17), 20, 24, 28, 32, 40, 48, 56, 64)
PROMPTS = tuple(round(2 ** (e / 2)) for e in range(8, 29))  # 16 to 16,384


class RouteExplorer(LiveFigure):
    """Sliders for α, β, γ, bandwidth, batch_thresh, load and lengths over a route map, with hardware presets.

    The sliders change the analytical model behind "seed-rule" and "seed-estimate". "slo" is there for profiles that
    have a step-time model, and looks at that: only load, lengths and objectives move it.

    Args:
        profiles: further hardware, by the name to show; beside the presets that ship with the package.
        ttft_ms, tpot_ms: objectives of "slo".
        context: KV tokens of each request that decodes.
        prefill_place, decode_place: step-time models of the disaggregated path, for profiles that have them.
    """

    def __init__(
        self,
        profiles: Mapping[str, HardwareProfile] | None = None,
        *,
        ttft_ms: float = 1000.0,
        tpot_ms: float = 50.0,
        context: int = 1024,
        prefill_place: str = WHOLE,
        decode_place: str = WHOLE,
    ) -> None:
        super().__init__()
        self.context, self.places = context, (prefill_place, decode_place)
        self.profiles = {**{name: preset(name) for name in preset_names()}, **(profiles or {})}
        self.ttft_ms, self.tpot_ms = ttft_ms, tpot_ms
        first = next(iter(profiles or ()), "rtx-4090")
        self.hardware = widgets.Dropdown(options=list(self.profiles), value=first, description="hardware")
        self.policy = widgets.Dropdown(options=["seed-rule"], description="policy")
        self.alpha = _log_slider("α ms/token", -3, 0)
        self.beta = _log_slider("β ms", -0.5, 2)
        self.gamma = _log_slider("γ ms/token", -3, 0)
        self.bandwidth = _log_slider("GB/s", -0.5, 3.5)
        self.batch_thresh = widgets.IntSlider(16, 1, 256, description="B*", continuous_update=False)
        self.load = widgets.SelectionSlider(options=LOADS, value=4, description="load", continuous_update=False)
        self.prompt = widgets.SelectionSlider(
            options=PROMPTS, value=1024, description="prompt", continuous_update=False
        )
        self.output = widgets.IntSlider(200, 1, 2000, description="output", continuous_update=False)
        self._loading = False
        self._controls = (self.alpha, self.beta, self.gamma, self.bandwidth, self.batch_thresh, self.policy,
                          self.load, self.prompt, self.output)  # fmt: skip
        for control in self._controls:
            control.observe(lambda _: self._show(), names="value")
        self.hardware.observe(lambda _: self._load_preset(), names="value")
        self._widget = self.layout(
            widgets.HBox([self.hardware, self.policy]),
            widgets.HBox([self.alpha, self.beta, self.gamma]),
            widgets.HBox([self.bandwidth, self.batch_thresh, self.output]),
            widgets.HBox([self.load, self.prompt]),
        )
        self._load_preset()

    @property
    def widget(self) -> widgets.Widget:
        return self._widget

    @property
    def profile(self) -> HardwareProfile:
        """The hardware as the sliders have it."""
        chosen = self.profiles[self.hardware.value]
        return replace(
            chosen,
            alpha_ms_per_token=self.alpha.value,
            beta_ms=self.beta.value,
            gamma_ms_per_token=self.gamma.value,
            bandwidth_gb_s=None if chosen.bandwidth_gb_s is None else self.bandwidth.value,
            batch_thresh=self.batch_thresh.value,
        )

    @property
    def decision(self) -> Decision:
        """For the request and the load that the sliders say."""
        request = imagined_request(self.prompt.value, self.output.value)
        return self._policy().decide(request, self.situation.at_load(self.load.value), self.output.value)

    @property
    def situation(self) -> Situation:
        """One worker of each role on this hardware. Memory is no limit: a small pool would leave holes in the map."""
        profile = replace(self.profile, num_blocks=None)
        prefill, decode = (place if place in profile.step_time else WHOLE for place in self.places)
        return Situation(profile, self.context, prefill_place=prefill, decode_place=decode)

    def draw(self) -> Figure:
        figure = bare_figure(8.5, 5.4)
        route_map = RouteMap.of(self._policy(), self.situation.at_load, LOADS, PROMPTS, self.output.value)
        draw_route_map(route_map, point=(self.load.value, self.prompt.value), ax=figure.add_subplot())
        return figure

    def _policy(self) -> Policy:
        name, profile = self.policy.value, self.profile
        if name == SloAware.name:
            return SloAware(profile.step_time, self.ttft_ms, self.tpot_ms, chunk_size=512)
        return make_policy(name, profile=profile)

    def _load_preset(self) -> None:
        """Sliders to the chosen hardware's values; one redraw at the end."""
        chosen = self.profiles[self.hardware.value]
        self._loading = True
        try:
            self.alpha.value, self.beta.value = chosen.alpha_ms_per_token, chosen.beta_ms
            self.gamma.value = max(chosen.gamma_ms_per_token, 10**self.gamma.min)
            self.bandwidth.disabled = chosen.bandwidth_gb_s is None  # a shared pool: nothing is moved
            if chosen.bandwidth_gb_s is not None:
                self.bandwidth.value = chosen.bandwidth_gb_s
            self.batch_thresh.value = round(chosen.batch_thresh)
            names = ["seed-rule", "seed-estimate", *([SloAware.name] if chosen.step_time else [])]
            before = self.policy.value
            self.policy.options = names
            self.policy.value = before if before in names else names[0]
        finally:
            self._loading = False
        self._show()

    def _show(self) -> None:
        if self._loading:
            return
        decision = self.attempt(lambda: self.decision)
        if decision is not None:
            self.say(
                f"Load {self.load.value}, {self.prompt.value:,} prompt tokens: {decision.path}. {decision.reason}."
            )


def _selection(name: str, values: Sequence[int], start: int) -> widgets.SelectionSlider:
    return widgets.SelectionSlider(options=values, value=start, description=name, continuous_update=False)


def _log_slider(name: str, low: float, high: float) -> widgets.FloatLogSlider:
    return widgets.FloatLogSlider(
        base=10, min=low, max=high, step=0.01, description=name, readout_format=".4g", continuous_update=False
    )
