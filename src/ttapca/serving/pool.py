"""`StreamPool`: many streams over one network, from many threads.

Requests wait in a `RequestQueue`. One thread takes those of different streams out of it, as many as
there are and fit, runs a pass for them and answers; so the requests of a stream are answered in
order, and no stream waits for another one longer than a pass. What controls a stream (mode, reset,
restore) is done by the same thread, between two passes.

States are in a `StreamShelf`. Another thread writes what has changed to disk every few seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Self, TypeVar, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ttapca._checks import Maybe, Number, OneOf, Whole, check_option
from ttapca.adaptation.chain_passes import Order
from ttapca.errors import (
    CallbackWarning,
    InputTypeError,
    NonFiniteError,
    OptionError,
    PoolClosedError,
    ShapeError,
    TtapcaError,
)
from ttapca.fitting.fitted_filter import FittedFilter
from ttapca.methods.wiener import Wiener
from ttapca.networks.evaluation import EvaluatedKind
from ttapca.serving.answers import Answer, Mode, StreamGlance, StreamStatus
from ttapca.serving.filtered_images import before_and_after
from ttapca.serving.gathered_network import GatheredNetwork, Look, Served
from ttapca.serving.pool_limits import PoolLimits, PoolObserver
from ttapca.serving.request_queue import Request, RequestQueue
from ttapca.serving.stream_names import check_name
from ttapca.serving.stream_record import StreamRecord
from ttapca.serving.stream_shelf import StreamShelf
from ttapca.serving.stream_store import StreamStore
from ttapca.spectral.constants import CONSTANTS
from ttapca.support.outputs import FindLogits

LOGGER = logging.getLogger("ttapca.serving")
PICTURES = 32  # streams whose last image is kept to be shown
Found = TypeVar("Found")


class StreamPool:
    """Predicts and adapts for many streams; any thread may call it.

    A stream has one of three modes. `on` answers with the adapted network. `shadow` answers with
    the untouched network, adapts beside it, and counts how often the two differ. `off` leaves the
    network untouched and only watches for a shift.

    Args:
        model: Returns logits for a batch of images.
        filter: A filter that was fitted on it.
        store: Where states are kept; without, they are lost when the pool is closed.
        mode: Of a new stream.
        limits: What the pool may hold.
        save_every: Seconds after which changed states are written to the store.
        observer: Is told what happens.
        logits: Finds the logits in what the model returns, where that is more than one tensor.
        outputs: What the outputs mean: `multiclass`, `binary` (one logit) or `multilabel`. By
            default one logit is `binary`, and more are `multiclass`.
        states, outliers, order: As for `ttapca.methods.Wiener`. `order="shuffled"` if the order in
            which images come means nothing.
        input_shape: Shape of one image, for a filter that does not act on the images themselves, or
            where images have another size than those of the fit.

    Attributes:
        input_shape: Shape of one image.

    Raises:
        OptionError: An option makes no sense.
        AttachError: The filter does not fit the model.
        SavedStreamError: The store keeps streams of another network or filter.

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
        check_option("mode", mode, OneOf(get_args(Mode)))
        check_option("save_every", save_every, Number(above=0))
        check_option("outputs", outputs, Maybe(OneOf(get_args(EvaluatedKind))))
        check_option("states", states, Whole(1, CONSTANTS.states))
        self.mode: Mode = mode
        self.limits = limits or PoolLimits()
        self.input_shape = tuple(input_shape or image_shape(filter))
        self._observer = observer or PoolObserver()
        method = Wiener(filter, states=states, outliers=outliers, order=order)
        self._network = GatheredNetwork(model, method, logits=logits, outputs=outputs)
        self._lock = threading.RLock()
        self._news = threading.Condition(self._lock)
        self._queue = RequestQueue(self.limits, self._news)
        self._controls: deque[Callable[[], None]] = deque()
        new_record = functools.partial(self._network.new_record, mode)
        try:
            self._shelf = StreamShelf(self.limits, self._network.kind, new_record, store)
        except BaseException:
            self._network.detach()
            raise
        self._looks: OrderedDict[str, Look] = OrderedDict()
        self._detached = False
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

    # Requests --------------------------------------------------------------------------------

    def submit(self, stream: str, images: Tensor) -> Future[Answer]:
        """Ask for predictions, and return at once.

        Args:
            stream: Whose images they are; a new name begins a new stream.
            images: As the model takes them, finite, shape (images, *input_shape).

        Raises:
            StreamNameError, InputTypeError, ShapeError, NonFiniteError: What was given is wrong.
            PoolFullError: Too many images wait.
            TooManyStreamsError: The stream is new, and there are too many.
            PoolClosedError: The pool was closed.
        """
        try:
            check_name(stream)
            self._check_images(images)
            came = time.perf_counter()
            with self._news:
                self._check_open()
                self._queue.check_room(len(images))
                place = self._shelf.admit(stream)
                request = Request(stream, images.detach(), Future(), came, place)
                self._queue.put(request)
        except TtapcaError as error:
            self._tell(self._observer.refused, type(error).__name__)
            raise
        return request.answer

    def predict(self, stream: str, images: Tensor, timeout: float | None = None) -> Answer:
        """Ask for predictions, and wait for them; see `submit`.

        Raises:
            TimeoutError: There is no answer after `timeout` seconds. The request is given up,
                unless its pass has begun.
        """
        asked = self.submit(stream, images)
        try:
            return asked.result(timeout)
        except TimeoutError:
            asked.cancel()
            raise

    def warm_up(self) -> None:
        """Compute beforehand what the first images of streams would wait for: about a second.

        What is usual depends on how many images a stream has shown. Without this, each new number
        takes ten milliseconds when it first comes up.
        """
        self._network.warm_up(self.limits.max_images)

    def _check_open(self) -> None:
        if self._queue.closing:
            raise PoolClosedError("This pool was closed, and takes no more requests.")

    def _check_images(self, images: object) -> None:
        if not isinstance(images, Tensor) or not images.is_floating_point():
            found = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise InputTypeError(
                f"Images must be a tensor of floating-point numbers; found {found}. Grey levels "
                "from 0 to 255 become such numbers by images / 255."
            )
        most = self.limits.max_images
        if images.shape[1:] != self.input_shape or not 0 < len(images) <= most:
            raise ShapeError(
                f"Images must have the shape (images, {', '.join(map(str, self.input_shape))}), "
                f"from 1 to {most} of them; found {tuple(images.shape)}."
            )
        if not bool(torch.isfinite(images).all()):
            raise NonFiniteError("Images must be finite; found NaN or infinity.")

    # What controls streams -------------------------------------------------------------------

    def names(self, *, shifted: bool | None = None) -> list[str]:
        """Return the names of streams, in memory or on disk, sorted.

        Args:
            shifted: Only those whose alarm is on, or only those whose alarm is off; None for all.
        """
        return self._shelf.names(shifted)

    def status(self, stream: str) -> StreamStatus:
        """Say how a stream is.

        Raises:
            UnknownStreamError: There is no such stream.
        """
        return self._network.status(stream, self._shelf.known(stream))

    def glance(self, stream: str) -> StreamGlance:
        """Say the little about a stream that takes no computing; `status` says all.

        Raises:
            UnknownStreamError: There is no such stream.
        """
        return self._shelf.known(stream).glance(stream)

    def set_mode(self, stream: str, mode: Mode) -> StreamStatus:
        """Switch a stream; a new name begins a new stream."""
        check_option("mode", mode, OneOf(get_args(Mode)))
        return self._change(
            stream, lambda: dataclasses.replace(self._shelf.known(stream), mode=mode), new=True
        )

    def reset(self, stream: str) -> StreamStatus:
        """Let a stream begin anew, in the mode that it has."""
        return self._change(
            stream, lambda: self._network.new_record(self._shelf.known(stream).mode)
        )

    def restore(self, stream: str, data: bytes) -> StreamStatus:
        """Let a stream go on, bit for bit, where one was when `dump` was called.

        Raises:
            SavedStreamError: The bytes are something else, or of another network or filter.
        """
        state = self._shelf.read(data)
        return self._change(stream, lambda: state, new=True)

    def dump(self, stream: str) -> bytes:
        """Return the whole state of a stream, for `restore`; a safetensors file.

        Raises:
            UnknownStreamError: There is no such stream.
        """
        return self._shelf.dump(stream)

    def drop(self, stream: str) -> None:
        """Forget a stream.

        Raises:
            UnknownStreamError: There is no such stream.
        """

        def forget() -> None:
            self._shelf.drop(stream)
            with self._lock:
                self._looks.pop(stream, None)

        check_name(stream)
        self._between_passes(forget)

    def pictures(self, stream: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]] | None:
        """Return the last image of a stream before and after the filter, if it can be shown.

        uint8, (height, width, 3).
        """
        self._shelf.check_known(stream)
        with self._lock:
            look = self._looks.get(stream)
        return None if look is None else before_and_after(*look)

    def _change(
        self, name: str, make: Callable[[], StreamRecord], *, new: bool = False
    ) -> StreamStatus:
        """Replace the state of a stream between two passes."""

        def work() -> StreamStatus:
            place = self._shelf.admit(name) if new else None
            try:
                state = make()
            except BaseException:
                if place is not None:
                    self._shelf.withdraw(name, place)
                raise
            self._shelf.put(name, state)
            return self._network.status(name, state)

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

    # Saving ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Write all states that have changed to the store, in one transaction."""
        self._shelf.save()

    def _save_now_and_then(self, seconds: float) -> None:
        while not self._rest.wait(seconds):
            self._try_to_save()

    def _try_to_save(self) -> None:
        """Save; where that fails, say so: a full disk may have room again later."""
        try:
            self.save()
        except TtapcaError as error:
            self._tell(self._observer.refused, type(error).__name__)
            if not self._unsaved:  # once, not at every attempt
                LOGGER.error("streams stay in memory, as they cannot be saved: %s", error)
            self._unsaved = True
        else:
            if self._unsaved:
                LOGGER.info("streams are saved again")
            self._unsaved = False

    # Passes ----------------------------------------------------------------------------------

    @property
    def queue_length(self) -> int:
        """How many images wait for an answer."""
        return self._queue.images

    @property
    def resident(self) -> int:
        """How many streams are in memory."""
        return len(self._shelf)

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
                chosen, given_up = self._queue.take() if self._queue else ([], [])
            for request in given_up:
                self._shelf.withdraw(request.stream, request.place)
            for control in controls:
                control()
            if chosen:
                self._shelf.make_room(len(chosen), self._try_to_save)
                self._answer(chosen)

    def _answer(self, requests: list[Request]) -> None:
        """Run a pass; where it fails, run one for each, so that only the culprit gets the error."""
        try:
            begun = time.perf_counter()
            states = [self._shelf.get(each.stream) for each in requests]
            served = self._network.serve(
                [(state, each.images) for state, each in zip(states, requests, strict=True)]
            )
        except BaseException as error:
            if len(requests) > 1:
                for each in requests:
                    self._answer([each])
            else:
                self._give_up(requests[0], error)
            return
        seconds = time.perf_counter() - begun
        images = sum(len(each.images) for each in requests)
        self._tell(self._observer.passed, images, len(requests), seconds)
        for request, one in zip(requests, served, strict=True):
            self._finish(request, one)

    def _give_up(self, request: Request, error: BaseException) -> None:
        """Tell whoever waits why there is no answer; a stream that would have begun has not."""
        self._shelf.withdraw(request.stream, request.place)
        _settle(request.answer, error)

    def _finish(self, request: Request, served: Served) -> None:
        """Remember what a pass made of a request, and answer it."""
        name, record = request.stream, served.record
        kept = self._shelf.put(name, record)
        if kept and served.look is not None:
            with self._lock:
                self._looks[name] = served.look
                self._looks.move_to_end(name)
                if len(self._looks) > PICTURES:
                    self._looks.popitem(last=False)
        answer = Answer(
            logits=served.logits,
            outputs=self._network.outputs,
            adapted=served.adapted,
            differ=served.differ,
            glance=record.glance(name),
            _status=lambda: self._network.status(name, record),
        )
        # The observer first: whoever has an answer finds it counted.
        self._tell(self._observer.answered, answer, time.perf_counter() - request.came)
        _settle(request.answer, answer)

    def _tell(self, notice: Callable[..., None], *facts: object) -> None:
        """Tell the observer; the threads of the pool outlive an error in it."""
        try:
            notice(*facts)
        except Exception as error:
            with suppress(CallbackWarning):  # where warnings are errors
                warnings.warn(
                    f"The observer of a pool must not raise; it did: {error!r}. The pool goes on.",
                    CallbackWarning,
                    stacklevel=2,
                )

    def close(self, *, drain: bool = True) -> None:
        """Take no more requests, answer those that wait, free the model, and save all streams.

        Args:
            drain: Whether to answer those that wait; otherwise they get a `PoolClosedError`.

        Raises:
            StorageError: The streams could not be saved; a second call tries it again.
        """
        with self._news:
            self._queue.closing = True
            if not drain:
                for request in self._queue.clear():
                    self._give_up(request, PoolClosedError("This pool was closed."))
            self._news.notify_all()
        self._worker.join()
        if self._saver is not None:
            self._rest.set()
            self._saver.join()
        with self._lock:
            if not self._detached:
                self._detached = True
                self._network.detach()
        self.save()

    def __enter__(self) -> Self:
        """Close the pool at the end of a `with` block."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the pool."""
        self.close()


def image_shape(fitted: FittedFilter) -> tuple[int, ...]:
    """Return the shape of the images that the model takes, where the filter knows it."""
    if fitted.outliers_ is None:
        raise OptionError(
            f"The filter at `{fitted.layer}` does not act on the images that the model takes, or "
            "was fitted by an older ttapca. Say what shape an image has with `input_shape=`."
        )
    return fitted.shape


def _settle(future: Future[Answer], outcome: Answer | BaseException) -> None:
    """Give an answer or an error to whoever waits, if anybody still does."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
