package main

import (
	"context"
	"sync"
)

// keeping is the writing of the files that outlive the process.
type keeping struct {
	stop    context.CancelFunc
	writing sync.WaitGroup
	last    func() // what is written at the end
	release func() // leaves the files to another process
}

// keepFiles reads the snapshot of an earlier run, then writes snapshots and the
// recording until ctx is done.
func (s *service) keepFiles(ctx context.Context) *keeping {
	k := &keeping{last: func() {}, release: func() {}}
	ctx, k.stop = context.WithCancel(ctx)
	if s.recorder != nil {
		k.writing.Go(func() { s.recorder.Run(ctx) })
	}
	if s.snapshot != nil {
		s.snapshot.load()
		k.writing.Go(func() { s.snapshot.run(ctx) })
		k.last, k.release = s.snapshot.save, s.snapshot.release
	}
	return k
}

// end writes what there is to write at the end.
func (k *keeping) end() {
	k.stop()
	k.writing.Wait()
	k.last()
	k.release()
}

// abandon leaves the files to another process.
func (k *keeping) abandon() {
	k.stop()
	k.writing.Wait()
	k.release()
	k.last = func() {}
}
