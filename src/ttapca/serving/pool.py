"""`StreamPool`: one thread runs passes and changes streams between them, another one saves."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import TypeVar, get_args

import torch
from torch import Tensor, nn

from ttapca import errors
from ttapca._checks import Maybe, Number, OneOf, Whole, check_option
from ttapca.adaptation.chain_passes import Order
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.wiener import Wiener
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.serving.batched_network import BatchedNetwork, Pixels
from ttapca.serving.fairness import Client
from ttapca.serving.limits import PoolLimits
from ttapca.serving.request_queue import Answer, Request, RequestQueue
from ttapca.serving.stream_cache import Admission, StreamCache
from ttapca.serving.stream_record import Mode, StreamGlance, StreamRecord, StreamStatus, check_name
from ttapca.serving.stream_store import StreamStore
from ttapca.spectral.constants import CONSTANTS
from ttapca.support.outputs import FindLogits

LOGGER = logging.getLogger("ttapca.serving")
Found = TypeVar("Found")
ANYONE = Client()


class PoolObserver:
    """Hears of the work of a pool, in the thread that does it; by default it does nothing.

    If it raises an `Exception`, the pool gives a `CallbackWarning` and goes on.
    """

    def passed(self, images: int, streams: int, seconds: float) -> None:
        """Take note of a forward pass."""

    def answered(self, answer: Answer, waited: float) -> None:
        """Take note of an answer before it is given, and of the seconds since its images came."""


class StreamPool(AbstractContextManager["StreamPool"]):
    """Predicts and adapts for many streams; any thread may call it.

    A stream has one of four modes. `on` answers with the adapted network. `shadow` answers with
    the untouched network, adapts beside it, and counts how often the two differ. `auto` does the
    same, and answers with the adapted network while that is expected to help. `off` leaves the
    network untouched and only watches for a shift.

    Args:
        model: Returns logits for a batch of images.
        filter: A filter that was fitted on it; for the mode `auto` with `labelled=`.
        store: Where streams are kept; without, they are lost when the pool is closed.
        mode: Of a new stream.
        limits: Of images and streams.
        save_every: Seconds after which changed streams are written to the store.
        observer: Hears of passes, answers and refusals.
        logits: Finds the logits in the output of the model, if that is more than one tensor.
        outputs: `multiclass`, `binary` or `multilabel`; one logit is `binary` by default.
        states, outliers, order: As for `ttapca.methods.Wiener`.
        input_shape: Shape of one image, for a filter that does not act on the images themselves, or
            if images have another size than those of the fit.

    Example:
        >>> import ttapca
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
        >>> fitted = ttapca.fit(model, "0", torch.rand(100, 1, 8, 8))
        >>> with StreamPool(model, fitted) as pool:
        ...     answer = pool.predict("camera-7", torch.rand(1, 1, 8, 8))
        ...     answer.logits.shape, pool.names()
        (torch.Size([1, 3]), ['camera-7'])
    """

    def __init__(
        self,
        model: nn.Module,
        filter: FittedFilter,
        *,
        store: StreamStore | None = None,
        mode: Mode = "on",
        limits: PoolLimits | None = None,
        save_every: float = 10.0,
        observer: PoolObserver | None = None,
        logits: FindLogits | None = None,
        outputs: EvaluatedKind | None = None,
        states: int = CONSTANTS.states,
        outliers: bool | None = None,
        order: Order | None = None,
        input_shape: Sequence[int] | None = None,
    ) -> None:
        check_option("save_every", save_every, Number(above=0))
        check_option("outputs", outputs, Maybe(OneOf(get_args(EvaluatedKind))))
        check_option("states", states, Whole(1, CONSTANTS.states))
        self._estimates = filter.temperature_ is not None and outputs != "multilabel"
        self._check_mode(mode)
        self.mode: Mode = mode
        self.limits = limits or PoolLimits()
        self.input_shape = tuple(input_shape or image_shape(filter))
        self._observer = observer or PoolObserver()
        method = Wiener(filter, states=states, outliers=outliers, order=order)
        self._network = BatchedNetwork(model, method, logits=logits, outputs=outputs)
        self._news = threading.Condition()
        self._queue = RequestQueue(self.limits, self._news)
        self._controls: deque[Callable[[], None]] = deque()
        new_record = functools.partial(self._network.new_record, mode)
        try:
            self._streams = StreamCache(self.limits, self._network.kind, new_record, store)
        except BaseException:
            self._network.detach()
            raise
        self._unsaved = False  # whether the last attempt to save has failed
        self._worker = threading.Thread(target=self._work, name="ttapca pool", daemon=True)
        self._worker.start()
        self._saver: threading.Thread | None = None
        if store is not None:
            self._rest = threading.Event()
            self._saver = threading.Thread(
                target=self._save_now_and_then, args=(save_every,), name="ttapca saver", daemon=True
            )
            self._saver.start()

    def submit(
        self,
        stream: str,
        images: Tensor,
        *,
        admit: Admission | None = None,
        client: Client = ANYONE,
        starts: bool = False,
        ends: bool = False,
    ) -> Future[Answer]:
        """Ask for predictions, and return at once.

        Clients, and streams of each, are answered in turn, by images. If too many images wait,
        some of the stream with most of them are refused: their future has a `PoolFullError`.

        Args:
            stream: Its name; a new name begins a new stream.
            images: As the model takes them, finite, shape (images, *input_shape).
            admit: Called with all names before a new stream begins; an error of it refuses that.
            client: Who asks, of those who have shares of the pool.
            starts: Whether the stream begins anew with these images, in its mode.
            ends: Whether the stream is forgotten when they are answered, also on disk.
        """
        check_name(stream)
        self._check_images(images)
        came = time.perf_counter()
        with self._news:
            self._check_open()
            request = Request(stream, images.detach(), Future(), came, client, starts, ends)
            self._streams.reserve(stream, request, admit)
            try:
                gone = self._queue.put(request)
            except errors.PoolFullError:
                self._streams.release(stream, request)
                raise
        for each in gone:
            self._streams.release(each.stream, each)
            if each.answer.set_running_or_notify_cancel():
                each.answer.set_exception(self._queue.full())
        return request.answer

    def predict(self, stream: str, images: Tensor, timeout: float | None = None) -> Answer:
        """Ask as `submit` does, and wait; after `timeout` seconds raise `TimeoutError`."""
        asked = self.submit(stream, images)
        try:
            return asked.result(timeout)
        except TimeoutError:
            asked.cancel()
            raise

    def check_admission(self, stream: str, admit: Admission) -> None:
        """Raise as `submit` would for a new stream, before the work of decoding its images."""
        self._streams.check_admission(stream, admit)

    def warm_up(self) -> None:
        """Calibrate for every number of images that a stream can have: it takes about a second."""
        self._network.warm_up(self.limits.max_images)

    def try_out(self) -> None:
        """Predict a grey image that belongs to no stream, or raise an error that says why not."""
        grey = torch.full((1, *self.input_shape), 0.5)
        new = ("trial", self._network.new_record(self.mode), grey)
        try:
            self._between_passes(lambda: self._network.predict([new]))
        except RuntimeError as error:
            raise errors.ShapeError(
                f"The network must take images of shape {self.input_shape}; it does not: {error}"
            ) from error

    def _check_open(self) -> None:
        if self._queue.closing:
            raise errors.PoolClosedError("This pool was closed, and takes no more requests.")

    def _check_images(self, images: object) -> None:
        if not isinstance(images, Tensor) or not images.is_floating_point():
            found = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise errors.InputTypeError(
                f"Images must be a tensor of floating-point numbers; found {found}. Grey levels "
                "from 0 to 255 become such numbers by images / 255."
            )
        most = self.limits.max_images
        if images.shape[1:] != self.input_shape or not 0 < len(images) <= most:
            raise errors.ShapeError(
                f"Images must have the shape (images, {', '.join(map(str, self.input_shape))}), "
                f"from 1 to {most} of them; found {tuple(images.shape)}."
            )
        if not bool(torch.isfinite(images).all()):
            raise errors.NonFiniteError("Images must be finite; found NaN or infinity.")

    def names(self, *, shifted: bool | None = None) -> list[str]:
        """Return the names of streams, in memory or on disk, sorted; or of (un)shifted ones."""
        return self._streams.names(shifted)

    def status(self, stream: str) -> StreamStatus:
        """Return how a stream is; an unknown one is an `UnknownStreamError`."""
        return self._network.status(stream, self._streams.known(stream))

    def glance(self, stream: str) -> StreamGlance:
        """Return the part of a stream's status that takes no computing; raises as `status`."""
        return self._streams.known(stream).glance(stream)

    def set_mode(self, stream: str, mode: Mode, *, admit: Admission | None = None) -> StreamStatus:
        """Switch a stream; a new name begins a new stream, as in `submit`."""
        self._check_mode(mode)
        get = self._streams.get
        return self._change(stream, lambda: dataclasses.replace(get(stream), mode=mode), admit)

    def _check_mode(self, mode: Mode) -> None:
        check_option("mode", mode, OneOf(get_args(Mode)))
        if mode == "auto" and not self._estimates:
            raise errors.OptionError(
                "The mode `auto` estimates how often both networks are wrong: it needs classes "
                "that exclude each other, and a filter that was fitted with labelled samples. Fit "
                "it with `ttapca fit ... --held-out 1000`, or `fit(labelled=)`, or choose `shadow`."
            )

    def reset(self, stream: str) -> StreamStatus:
        """Let a stream begin anew, in the mode that it has."""
        network, known = self._network, self._streams.known
        return self._change(stream, lambda: network.new_record(known(stream).mode))

    def restore(self, stream: str, data: bytes, *, admit: Admission | None = None) -> StreamStatus:
        """Let a stream go on, bit for bit, where one was when `dump` was called; see `submit`."""
        record = self._streams.parse(data)
        return self._change(stream, lambda: record, admit)

    def dump(self, stream: str) -> bytes:
        """Return all of a stream, for `restore`, as a safetensors file; raises as `status`."""
        return self._streams.known(stream).to_bytes(self._network.kind)

    def drop(self, stream: str) -> None:
        """Forget a stream, also on disk; raises as `status`."""
        check_name(stream)
        self._between_passes(lambda: self._streams.drop(stream))

    def pictures(self, stream: str) -> tuple[Pixels, Pixels] | None:
        """Return the last image before and after the filter, uint8 (height, width, 3), if known."""
        last = self._streams.last_image(stream)
        return None if last is None else last.pictures()

    def _change(
        self, name: str, make: Callable[[], StreamRecord], admit: Admission | None = None
    ) -> StreamStatus:
        """Replace the record of a stream, or begin a new one, between two passes."""

        def work() -> StreamStatus:
            record = make()
            self._streams.reserve(name, record, admit)
            self._streams.put(name, record)
            return self._network.status(name, record)

        check_name(name)
        return self._between_passes(work)

    def _between_passes(self, work: Callable[[], Found]) -> Found:
        done: Future[Found] = Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        with self._news:
            self._check_open()
            self._controls.append(run)
            self._news.notify_all()
        return done.result()

    def save(self) -> None:
        """Write all streams that have changed to the store, in one transaction."""
        self._streams.save()

    def _save_now_and_then(self, seconds: float) -> None:
        while not self._rest.wait(seconds):
            self._try_to_save()

    def _try_to_save(self) -> None:
        """Save, and go on after an error: a full disk may have room again later."""
        before = self._unsaved
        try:
            self.save()
        except errors.TtapcaError as error:
            self._unsaved = True
            if not before:  # once, not at every attempt
                LOGGER.error("streams stay in memory, as they cannot be saved: %s", error)
        else:
            self._unsaved = False
            if before:
                LOGGER.info("streams are saved again")

    @property
    def queue_length(self) -> int:
        """How many images wait for an answer."""
        return self._queue.images

    @property
    def resident(self) -> int:
        """How many streams are in memory."""
        return len(self._streams)

    @property
    def closed(self) -> bool:
        """Whether the pool takes no more requests."""
        return self._queue.closing

    def _work(self) -> None:
        """Answer requests until the pool is closed and nothing waits."""
        while True:
            with self._news:
                while not (self._queue or self._controls or self._queue.closing):
                    self._news.wait()
                controls, self._controls = self._controls, deque()
                if not self._queue and not controls:
                    return
                chosen, cancelled = self._queue.take() if self._queue else ([], [])
            for request in cancelled:
                self._streams.release(request.stream, request)
            for control in controls:
                control()
            if chosen:
                self._streams.make_room(len(chosen), self._try_to_save)
                self._answer(chosen)

    def _answer(self, requests: list[Request]) -> None:
        """Run a pass; if it fails, run one for each, so that only the culprit gets the error."""
        try:
            begun = time.perf_counter()
            predictions = self._network.predict(
                [(each.stream, self._record_for(each), each.images) for each in requests]
            )
        except BaseException as error:
            if len(requests) > 1:
                for each in requests:
                    self._answer([each])
            else:  # a stream that would have begun has not
                self._streams.release(requests[0].stream, requests[0])
                requests[0].answer.set_exception(error)
            return
        seconds = time.perf_counter() - begun
        images = sum(len(each.images) for each in requests)
        self._tell(self._observer.passed, images, len(requests), seconds)
        for request, (record, answer, image) in zip(requests, predictions, strict=True):
            self._streams.put(request.stream, record, image)
            # The observer first: a caller who has an answer finds it counted.
            self._tell(self._observer.answered, answer, time.perf_counter() - request.came)
            try:
                if request.ends:
                    with suppress(errors.UnknownStreamError):  # dropped while it waited
                        self._streams.drop(request.stream)
            except errors.TtapcaError as error:
                request.answer.set_exception(error)
            else:
                request.answer.set_result(answer)

    def _record_for(self, request: Request) -> StreamRecord:
        record = self._streams.get(request.stream)
        return self._network.new_record(record.mode) if request.starts else record

    def _tell(self, notice: Callable[..., None], *facts: object) -> None:
        """Tell the observer; the threads of the pool outlive an error in it."""
        try:
            notice(*facts)
        except Exception as error:
            with suppress(errors.CallbackWarning):  # if warnings are errors
                warnings.warn(
                    f"The observer of a pool must not raise; it did: {error!r}. The pool goes on.",
                    errors.CallbackWarning,
                    stacklevel=2,
                )

    def close(self) -> None:
        """Take no more requests, answer those that wait, free the model, and save all streams."""
        with self._news:
            self._queue.closing = True
            self._news.notify_all()
        self._worker.join()
        if self._saver is not None:
            self._rest.set()
            self._saver.join()
        self._network.detach()
        self.save()

    def __exit__(self, *exception: object) -> None:
        """Close the pool."""
        self.close()


def image_shape(fitted: FittedFilter) -> tuple[int, ...]:
    """Return the shape of the images that the model takes, if the filter knows it."""
    if fitted.outliers_ is None:
        raise errors.OptionError(
            f"The filter at `{fitted.layer}` does not act on the images that the model takes, or "
            "was fitted by an older ttapca. Say what shape an image has with `input_shape=`."
        )
    return fitted.shape
