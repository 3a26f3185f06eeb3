package main

import (
	"context"
	"os"
	"slices"
	"time"

	"warmroute/config"
)

// reloader reads the configuration, and again when it may be another. Not safe
// for concurrent use.
type reloader struct {
	file  string                         // the configuration's own; "" for none
	load  func() (*config.Config, error) // as config.Load
	files fileWatch
}

// reading is what a reloader has read.
type reading struct {
	config *config.Config
	err    error
}

func newReloader(file string, load func() (*config.Config, error)) *reloader {
	r := &reloader{file: file, load: load}
	r.files.names = (&config.Config{}).Files(file)
	return r
}

// read reads the configuration. Its files are noted before they are read, so that
// no change in between is missed; and as only the configuration says which those
// are, it is read once more when it names others than before, accepted or not.
func (r *reloader) read() (c *config.Config, err error) {
	for range 2 {
		r.files.note()
		c, err = r.load()
		if c == nil || slices.Equal(c.Files(r.file), r.files.names) {
			return c, err
		}
		r.files.names = c.Files(r.file)
		if r.file != "" && config.CheckRegular(r.file) != nil { // that was the only time
			r.files.note()
			return c, err
		}
	}
	return c, err
}

// again is read for a service that runs.
func (r *reloader) again() (*config.Config, error) {
	if r.file != "" {
		if err := config.CheckRegular(r.file); err != nil {
			r.files.note()
			return nil, err
		}
	}
	return r.read()
}

// follow sends what it reads whenever it is asked to, and when the files have
// changed, until ctx is done; then ended is closed. A network disk may hold that
// up for ever, so nobody should wait for it long. r may be nil: then nothing is
// ever sent.
func (r *reloader) follow(ctx context.Context, asked <-chan os.Signal) (readings <-chan reading, ended <-chan struct{}) {
	sent, done := make(chan reading), make(chan struct{})
	if r == nil {
		close(done)
		return nil, done
	}
	go func() {
		defer close(done)
		looks := time.NewTicker(watchEvery)
		defer looks.Stop()
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-asked:
				r.send(ctx, sent)
			case <-looks.C:
				if r.files.changed() {
					r.send(ctx, sent)
				}
			}
		}
	}()
	return sent, done
}

func (r *reloader) send(ctx context.Context, sent chan<- reading) {
	c, err := r.again()
	select {
	case sent <- reading{c, err}:
	case <-ctx.Done():
	}
}
