"""`sound.degrade`: what it does to recordings, measured by other means, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import signal

from ttapca.corruptions import sound
from ttapca.errors import InputTypeError, NonFiniteError, OptionError, ShapeError

RATE = 8000
NOISES = ("white", "pink", "babble", "hum")
WITHOUT_CHANCE = ("telephone", "clipping", "gain", "quantisation")
RATIOS = (20, 15, 10, 5, 0)


def word(number: int, samples: int = 6000) -> np.ndarray:
    """A sum of tones that swells and fades."""
    time = np.arange(samples) / RATE
    tones = [np.sin(2 * np.pi * (130 + 37 * number) * k * time + k * number) / k for k in (1, 2, 5)]
    return 0.2 * np.sum(tones, 0) * np.hanning(samples)


WORDS = [word(number, 5000 + 333 * number) for number in range(4)]
OTHERS = [word(number, 4000 + 111 * number) for number in range(10, 20)]


def degrade(recordings, kind, severity=3, **options):
    others = OTHERS if kind == "babble" else None
    return sound.degrade(
        recordings, kind, severity, **{"sample_rate": RATE, "others": others, **options}
    )


@pytest.mark.parametrize("severity", sound.SEVERITIES)
@pytest.mark.parametrize("kind", NOISES)
def test_noise_has_its_ratio_whatever_silence_is_around(kind, severity):
    steady = np.sin(2 * np.pi * 440 * np.arange(RATE) / RATE)
    quiet = np.pad(steady, 1600)
    for recording in (steady, quiet, 0.01 * steady):
        noise = degrade(recording, kind, severity) - recording
        ratio = 10 * np.log10(np.mean(recording[recording != 0] ** 2) / np.mean(noise**2))
        assert ratio == pytest.approx(RATIOS[severity - 1], abs=0.01)


def test_white_noise_is_flat_and_pink_noise_has_equal_octaves():
    tone = np.sin(2 * np.pi * 1000 * np.arange(200_000) / RATE)
    for kind, slope in (("white", 0.0), ("pink", -1.0)):
        frequency, density = signal.welch(degrade(tone, kind) - tone, RATE, nperseg=2048)
        inside = (frequency > 50) & (frequency < 3800)
        found = np.polyfit(np.log(frequency[inside]), np.log(density[inside]), 1)[0]
        assert found == pytest.approx(slope, abs=0.05), kind


def test_hum_has_lines_at_the_overtones_of_the_mains_only():
    tone = np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)  # one second: a bin is 1 Hz
    power = np.abs(np.fft.rfft(degrade(tone, "hum") - tone)) ** 2
    lines = np.arange(50, 501, 50)
    assert power[lines].sum() == pytest.approx(power.sum())
    assert power[lines] / power[50] == pytest.approx(1 / np.arange(1, 11) ** 2)


@pytest.mark.parametrize(("severity", "low", "high"), [(1, 200, 3600), (5, 600, 2000)])
def test_a_telephone_leaves_its_band(severity, low, high):
    click = np.zeros(RATE)
    click[4000] = 1.0
    response = np.abs(np.fft.rfft(degrade(click, "telephone", severity)))
    frequency = np.arange(response.size)
    inside = (frequency >= low) & (frequency <= high)
    assert response[inside] == pytest.approx(1.0)
    assert response[~inside] == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("severity", "seconds", "below"), [(2, 0.35, 6), (5, 1.0, -3)])
def test_echoes_fall_by_60_db_in_their_time_and_come_after_the_sound(severity, seconds, below):
    click = np.zeros(2 * RATE)
    click[0] = 1.0
    room = degrade(click, "reverberation", severity)
    assert room[0] == pytest.approx(1.0)
    assert room[1:40] == pytest.approx(0.0, abs=1e-12)
    assert 10 * np.log10(1 / np.sum(room[1:] ** 2)) == pytest.approx(below)
    # Schroeder's decay curve, between 5 and 25 dB down.
    decay = 10 * np.log10(np.cumsum(room[:0:-1] ** 2)[::-1])
    decay -= decay[0]
    begin, end = (int(np.argmax(decay < level)) for level in (-5, -25))
    assert 3 * (end - begin) / RATE == pytest.approx(seconds, rel=0.15)
    assert np.abs(degrade(np.roll(click, 500), "reverberation", severity)[:500]).max() < 1e-12


@pytest.mark.parametrize(("severity", "share"), [(1, 0.02), (2, 0.05), (3, 0.1), (5, 0.4)])
def test_clipping_cuts_off_its_share_of_what_is_not_silent(severity, share):
    recording = np.pad(word(1), 3000)
    clipped = degrade(recording, "clipping", severity)
    limit = np.abs(clipped).max()
    sounding = np.abs(recording[recording != 0])
    assert np.mean(sounding > limit) == pytest.approx(share, abs=1e-3)
    untouched = np.abs(recording) <= limit
    assert (clipped[untouched] == recording[untouched]).all()
    assert (clipped[~untouched] == limit * np.sign(recording[~untouched])).all()


@pytest.mark.parametrize(("severity", "bits"), [(1, 8), (3, 6), (4, 5), (5, 4)])
def test_quantisation_leaves_so_many_levels_and_the_loudest_sample(severity, bits):
    recording = word(2)
    coarse = degrade(recording, "quantisation", severity)
    assert len(np.unique(coarse.round(12))) <= 2**bits - 1
    loudest = np.abs(recording).argmax()
    assert coarse[loudest] == pytest.approx(recording[loudest])
    half_a_step = np.abs(recording).max() / (2 ** (bits - 1) - 1) / 2
    assert np.abs(coarse - recording).max() <= half_a_step * (1 + 1e-12)


def test_gain_is_in_decibels():
    assert degrade(word(0), "gain", 5) == pytest.approx(word(0) / 10**1.5)


def test_babble_is_made_of_the_others_and_never_of_the_recording_itself():
    alone, other = word(1), word(5)
    noise = sound.degrade(alone, "babble", 5, sample_rate=RATE, others=[alone, other]) - alone
    # Five times one voice, each turned: at every frequency of the voice, and at no other.
    power, voice = (np.abs(np.fft.rfft(each)) ** 2 for each in (noise, other))
    assert power[voice < 1e-6 * voice.max()].sum() < 1e-5 * power.sum()
    with pytest.raises(OptionError, match=r"not recording 0 itself; found none among 1"):
        sound.degrade(alone, "babble", 5, sample_rate=RATE, others=[alone])


@pytest.mark.parametrize("kind", ["telephone", "clipping", "quantisation"])
def test_twice_is_as_good_as_once(kind):
    for recording in (word(3), np.pad(word(3), 1000)):
        once = degrade(recording, kind, 4)
        assert degrade(once, kind, 4) == pytest.approx(once, abs=1e-12)


@pytest.mark.parametrize("kind", sound.KINDS)
def test_scale_does_not_matter(kind):
    assert degrade(word(3) / 1024, kind) * 1024 == pytest.approx(degrade(word(3), kind))


@pytest.mark.parametrize("kind", sound.KINDS)
def test_a_recording_is_the_same_in_any_batch(kind):
    whole = degrade(WORDS, kind, 5, seed=3)
    assert [len(each) for each in whole] == [len(each) for each in WORDS]
    assert (degrade(WORDS[2], kind, 5, seed=3, start=2) == whole[2]).all()
    parts = degrade(WORDS[:1], kind, 5, seed=3) + degrade(WORDS[1:], kind, 5, seed=3, start=1)
    assert all((one == two).all() for one, two in zip(whole, parts, strict=True))
    stacked = degrade(np.stack([word(1), word(1)]), kind, 5, seed=3)
    assert (stacked[0] == stacked[1]).all() == (kind in WITHOUT_CHANCE)
    other = degrade(WORDS[0], kind, 5, seed=4)
    assert (other == whole[0]).all() == (kind in WITHOUT_CHANCE)
    severer, milder = (degrade(WORDS[0], kind, each) - WORDS[0] for each in (5, 1))
    assert np.sum(severer**2) > np.sum(milder**2)


@pytest.mark.parametrize("kind", sound.KINDS)
def test_types_stay_silence_stays_and_input_is_not_written_to(kind):
    recording = word(0).astype(np.float32)
    before = recording.copy()
    assert degrade(recording, kind).dtype == np.float32
    assert (recording == before).all()
    assert (degrade(np.zeros(300), kind) == 0).all()
    assert np.isfinite(degrade(np.ones(1), kind)).all()
    assert degrade(np.zeros((0, 300)), kind).shape == (0, 300)
    assert degrade([], kind) == []


@pytest.mark.parametrize(
    ("recordings", "options", "error", "words"),
    [
        (np.zeros(9, np.int16), {}, InputTypeError, r"found int16\. .* by samples / 32768"),
        ([[0.0, 1.0]], {}, InputTypeError, "found list"),
        (np.zeros((2, 2, 9)), {}, ShapeError, r"found \(2, 9\)\. Of several channels"),
        (np.zeros((2, 0)), {}, ShapeError, "at least one sample"),
        (np.array([0.0, np.nan]), {}, NonFiniteError, "Recording 0: samples must be finite"),
        (np.zeros(9), {"kind": "pinc"}, OptionError, "pink"),
        (np.zeros(9), {"severity": 6}, OptionError, "from 1 to 5; found 6"),
        (np.zeros(9), {"severity": True}, OptionError, "whole number"),
        (np.zeros(9), {"seed": -1}, OptionError, "`seed`"),
        (np.zeros(9), {"start": -1}, OptionError, "`start`"),
        (np.zeros(9), {"sample_rate": 0}, OptionError, "from 2000"),
        (np.zeros(9), {"others": OTHERS}, OptionError, "found some for white"),
        (np.zeros(9), {"kind": "babble"}, OptionError, "found none"),
        (np.zeros(9), {"kind": "babble", "others": [np.zeros((2, 2))]}, ShapeError, "`others`"),
    ],
)
def test_bad_input_is_refused_with_the_rule_and_the_way_out(recordings, options, error, words):
    given = {"kind": "white", "severity": 3, "sample_rate": RATE, **options}
    with pytest.raises(error, match=words):
        sound.degrade(recordings, **given)
