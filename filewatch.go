package main

import (
	"io"
	"os"
	"time"

	"github.com/zeebo/xxh3"

	"warmroute/backends/transport"
)

const (
	// watchEvery is how often the configuration's files are looked at.
	watchEvery = time.Second
	// mostWatched is how much of one file is looked at.
	mostWatched = 16 << 20
)

// fileWatch sees when files have another content. It reads them, which costs
// microseconds, instead of asking the kernel for events: so an editor's rename,
// Kubernetes' swapped symlinks, a bind mount and a network disk are all the same.
type fileWatch struct {
	names []string // of what is looked at
	known uint64   // fingerprint of what was acted upon
	last  uint64   // of the look before
}

// note takes what the files hold now for known.
func (f *fileWatch) note() {
	f.known, _ = fingerprint(f.names)
	f.last = f.known
}

// changed reports whether the files have another content than what is known,
// and had the same at the look before: what is half written, or half of a pair,
// is left a round to be finished. What could not be read for want of a descriptor
// has not changed.
func (f *fileWatch) changed() bool {
	now, readable := fingerprint(f.names)
	if !readable {
		return false
	}
	settled := now == f.last
	f.last = now
	return settled && now != f.known
}

// fingerprint is a hash of what the named files hold. What is no plain file, as
// a pipe, could be read only once and never changes. readable is false when there
// was no file descriptor to read one of them with.
func fingerprint(names []string) (sum uint64, readable bool) {
	hash, readable := xxh3.New(), true
	for _, name := range names {
		hash.WriteString(name + "\x00")
		if info, err := os.Stat(name); err != nil {
			hash.WriteString("\x00absent\x00")
			continue
		} else if !info.Mode().IsRegular() {
			continue
		}
		file, err := os.Open(name)
		if err == nil {
			io.Copy(hash, io.LimitReader(file, mostWatched))
			file.Close()
		}
		readable = readable && !transport.IsOutOfDescriptors(err)
	}
	return hash.Sum64(), readable
}
