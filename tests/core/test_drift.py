"""The drift alarm: quiet while errors vary as before, heard when they rise, and once."""

import json

import numpy as np
import pytest

from wmrl_embodied.core.drift import DriftAlarm


def test_score_by_hand():
    alarm = DriftAlarm(recent=2, before=8)
    for error in [1.0, 3.0] * 4 + [4.0, 6.0]:
        alarm.observe(error)
    # 5 against 2; variance of the earlier 8 is 8/7, so the standard error is sqrt(8/7 * (1/2 + 1/8)).
    assert alarm.score == pytest.approx(3 / np.sqrt(8 / 7 * 0.625))
    assert alarm.alarms == 0


def test_errors_that_vary_as_before_raise_no_alarm():
    false = 0
    for seed in range(20):
        alarm = DriftAlarm()
        for error in np.random.default_rng(seed).gamma(8, 0.02, 300):
            alarm.observe(error)
        false += alarm.alarms
    assert false <= 2  # in 6000 steps


def test_a_model_that_breaks_is_caught_within_its_window_and_said_once(caplog):
    rng = np.random.default_rng(0)
    alarm = DriftAlarm()
    for step in range(60):
        alarm.observe(rng.gamma(8, 0.02) + 0.4 * (step >= 30))
        assert alarm.alarms == (step >= 33) or step in (31, 32)
    assert alarm.alarms == 1 and caplog.text.count("drift: squared error") == 1
    assert "Raise anchors.fraction" in caplog.text


def test_rounding_of_a_constant_error_is_no_drift():
    alarm = DriftAlarm()
    for step in range(40):
        alarm.observe(0.1 + 1e-12 * step)
    assert alarm.alarms == 0


def test_off_and_state():
    off, on, other = DriftAlarm(None), DriftAlarm(), DriftAlarm()
    for step in range(50):
        for alarm in (off, on):
            alarm.observe(0.1 + 0.02 * (step % 3) + (step > 40))
    assert off.alarms == 0 and on.alarms == 1
    other.load_state_dict(json.loads(json.dumps(on.state_dict())))
    assert other.state_dict() == on.state_dict()
    for alarm in (on, other):
        alarm.observe(0.3)
    assert other.score == on.score


@pytest.mark.parametrize("settings", [{"threshold": 0.0}, {"recent": 0}, {"before": 7}])
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match=str(next(iter(settings.values())))):
        DriftAlarm(**settings)
