package replay

import (
	"errors"
	"fmt"
	"strconv"
	"time"
)

// deviceShare is the state of an engine's step on hardware that replicas share: each of the engines that work at a time
// gets an equal part of it.
type deviceShare struct {
	left    time.Duration // of the step, if the engine had the device to itself
	since   time.Duration // time for which left is known
	engines int           // that have worked since then; 0: the step has just begun
	ends    int           // number of the last event for the step's end; those before it are void
}

func (s *Scenario) validateDevices() error {
	switch {
	case s.Devices == nil:
		return nil
	case len(s.Devices) != s.Backends:
		return fmt.Errorf("%d devices for %d backends; name one for each", len(s.Devices), s.Backends)
	case s.RankRouting || s.Lockstep:
		return errors.New("ranks that are routed or step together cannot share devices")
	}
	return nil
}

// deviceName returns the name of a replica's device for the router, "" if it is told of none.
func (s *Scenario) deviceName(backend int) string {
	if s.Devices == nil || s.DevicesUnknown {
		return ""
	}
	return "device-" + strconv.Itoa(s.Devices[backend])
}

// groupByDevice returns for each replica the indexes of all replicas on its device, itself included; nil if each has
// its own.
func groupByDevice(devices []int) [][]int {
	members := map[int][]int{}
	for i, d := range devices {
		members[d] = append(members[d], i)
	}
	var groups [][]int
	for _, d := range devices {
		groups = append(groups, members[d])
	}
	return groups
}

// isWorking reports whether the engine computes anything in its current step, for which it needs the device.
func (e *rank) isWorking() bool { return e.step.Decoded+e.step.Prefilled > 0 }

// shareDevice schedules the ends of all steps on a replica's device again if the number of engines that work there has
// changed, and those of steps that have just begun.
func (r *run) shareDevice(index int) {
	working := 0
	for _, i := range r.sharing[index] {
		for k := range r.fleet[i].ranks {
			if r.fleet[i].ranks[k].isWorking() {
				working++
			}
		}
	}
	for _, i := range r.sharing[index] {
		for k := range r.fleet[i].ranks {
			e := &r.fleet[i].ranks[k]
			if d := &e.device; e.isWorking() && d.engines != working {
				if d.engines > 0 {
					d.left -= (r.now - d.since) / time.Duration(d.engines)
				}
				d.since, d.engines = r.now, working
				r.pushStepEnd(r.now+max(0, d.left)*time.Duration(working), i, k)
			}
		}
	}
}
