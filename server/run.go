package server

import (
	"context"
	"errors"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"warmroute/backends"
	"warmroute/recovery"
)

const (
	// maxAcceptDelay bounds for how long a proxy accepts no connections at its start if a
	// backend does not respond to its check. It is above the default of health.timeout.
	maxAcceptDelay = 5 * time.Second
	// watcherTimeout bounds how long the end waits for a configuration file that is being read.
	watcherTimeout = time.Second
)

// Run serves until ctx is done or another process has taken over; then requests in flight may finish. It
// returns when all that it started has ended, and may be called once.
func (s *Server) Run(ctx context.Context) error {
	defer runtime.KeepAlive(newHeapBallast())
	// Requests in flight need all of this after ctx is done.
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var routing, logs sync.WaitGroup
	s.files.loadSnapshotAndStartWriters(background, s.panics)
	if s.cluster != nil {
		s.cluster.LoadSnapshot(ctx) // after that of the file, which is older
	}
	kvEvents, stopKVEvents := context.WithCancel(background)
	defer stopKVEvents()
	reloads, watcherEnded := s.process.watcher.startWatching(background, s.process.reloads, s.panics)
	routing.Go(s.fleet.Start(background))
	routing.Go(func() { s.panics.RunLoop(background, recovery.Tick, s.router.Run) })
	routing.Go(func() { s.panics.RunLoop(background, recovery.StartHooks, s.hookCaller.run) })
	routing.Go(func() { s.panics.RunLoop(background, recovery.History, s.proxy.SampleQueue) })
	routing.Go(func() { s.panics.RunLoop(background, recovery.ModelNames, s.proxy.ObserveModels) })
	if s.cluster != nil {
		routing.Go(func() { s.cluster.Run(background) })
	}
	logs.Go(func() { s.accessLog.Run(background, s.panics) }) // not in a binary upgrade: two processes may write to it at once
	logs.Go(func() { s.saveUsageUntilDone(background) })
	if s.tracer != nil {
		logs.Go(func() { s.tracer.Run(background) })
	}
	defer func() {
		stop()
		routing.Wait()
		s.files.stopAndSave()
		logs.Wait() // last: a reader of lines or spans that hangs must not delay the snapshot
		select {
		case <-watcherEnded:
		case <-time.After(watcherTimeout):
		}
	}()
	defer s.listeners.closeAndWait()

	checked := s.startupChecks.done
	if s.process.inherited.ready != nil {
		// The predecessor still serves. Requests accepted now would fail: no backend is ready yet.
		select {
		case <-checked:
		case <-ctx.Done():
		}
		if ctx.Err() != nil { // the predecessor goes on with the sockets and the files
			s.files.stopWithoutSaving()
			s.usage.UnlockFile()
			return nil
		}
		checked = nil
		s.notifySystemdAndPredecessor()
	}
	routing.Go(func() { s.kvEvents.Serve(kvEvents) })
	s.startServingAdmin()
	// Connections wait for the first checks: a load balancer that does not check readiness
	// sends requests as soon as the port is open, and they would find no backend ready.
	select {
	case <-s.startupChecks.done:
	case <-time.After(maxAcceptDelay):
	case <-ctx.Done():
	}
	s.startServingPublic()
	switch err := s.runEventLoop(ctx, checked, reloads); err {
	case nil:
		s.failReadinessAndWait(ctx)
		return s.shutDownHTTP()
	case errUpgraded:
		stopKVEvents() // so that replicas connect to the new process
		s.files.stopWithoutSaving()
		s.usage.UnlockFile()
		return s.shutDownAfterUpgrade(ctx)
	default:
		return errors.Join(err, s.shutDownHTTP())
	}
}

// runEventLoop reloads and starts binary upgrades until ctx is done, serving fails, or another process has taken over
// (errUpgraded). Once checksDone is closed it reports the service as ready. A binary upgrade in progress is
// stopped with it: when the service is stopped, no process may stay that took over at the same moment.
func (s *Server) runEventLoop(ctx context.Context, checksDone <-chan struct{}, reloads <-chan loadResult) error {
	var child childProcess
	defer func() {
		if child.stop != nil {
			child.stop(stopSignalOf(ctx))
		}
	}()
	checkModels := time.NewTicker(modelWarningsInterval)
	defer checkModels.Stop()
	for {
		fleetChanged := s.registry.StateChanged() // before looking
		s.applyFleetSize()
		select {
		case <-fleetChanged:
		case now := <-checkModels.C:
			s.logModelWarnings(now)
		case <-ctx.Done():
			return nil
		case err := <-s.listeners.failed:
			return err
		case <-checksDone:
			checksDone = nil
			s.notifySystemdAndPredecessor()
		case loaded := <-reloads:
			s.applyReloadAndNotify(loaded, checksDone == nil)
		case <-s.process.upgrades:
			child = s.startUpgrade(child)
		case err := <-child.serves:
			pid := child.pid
			child = childProcess{}
			if err == nil {
				s.log.Info("binary upgrade done; finishing requests in flight", "pid", pid)
				s.notifySystemd("MAINPID=" + strconv.Itoa(pid))
				return errUpgraded
			}
			s.log.Error("binary upgrade failed, this process keeps serving", "err", err)
		}
	}
}

// startupChecks closes done when every backend of the start was checked once: until
// then no request can be routed. Safe for concurrent use.
type startupChecks struct {
	done chan struct{}

	mu      sync.Mutex
	pending map[*backends.Backend]bool
}

func newStartupChecks(all []*backends.Backend) *startupChecks {
	c := &startupChecks{done: make(chan struct{}), pending: map[*backends.Backend]bool{}}
	for _, b := range all {
		c.pending[b] = true
	}
	if len(all) == 0 {
		close(c.done)
	}
	return c
}

// removePending is called when a backend was checked, or is not waited for any more.
func (c *startupChecks) removePending(b *backends.Backend) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.pending[b] {
		return
	}
	if delete(c.pending, b); len(c.pending) == 0 {
		close(c.done)
	}
}

// heapBallastBytes is what may be allocated between two garbage collections beyond the usual doubling of the
// heap. A proxy lives on a few megabytes and allocates several kilobytes a request: without it the collector
// would run a hundred times a second under load. GOGC would not do: what leaves a small heap enough room lets
// the heap of ten thousand streams grow to a multiple of what they need.
const heapBallastBytes = 32 << 20

// newHeapBallast returns memory that the garbage collector counts as live and that
// takes no RAM, since it is never touched; nil if the environment tunes the collector.
func newHeapBallast() []byte {
	if os.Getenv("GOGC") != "" || os.Getenv("GOMEMLIMIT") != "" {
		return nil
	}
	return make([]byte, heapBallastBytes)
}

// saveUsageUntilDone saves the usage of keys every minute until ctx is done, and then that of the last requests: also after
// a binary upgrade, when the successor saves to the same file.
func (s *Server) saveUsageUntilDone(ctx context.Context) {
	s.panics.RunLoop(ctx, recovery.Usage, func(ctx context.Context) { s.usage.SavePeriodically(ctx, s.log) })
	s.panics.CallAndRecover(recovery.Usage, func() { s.usage.Save(s.log) })
	s.usage.UnlockFile()
}
