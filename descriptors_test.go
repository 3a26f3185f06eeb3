package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

func TestLimitsBeyondTheProcessesDescriptorsAreNoticed(t *testing.T) {
	c := mustLoad(t, "limits: {in_flight: 1000, connections: 3000}\nconnections: {max_per_backend: 400}", "http://a:8000", "http://b:8000")
	const need = 3000 + 800 + 4 + spareDescriptors // the two backends take 800 connections and no more
	if w := c.descriptorWarning(need); w != "" {
		t.Errorf("enough, and still %q", w)
	}
	if w := c.descriptorWarning(need - 1); !strings.Contains(w, "raise it to 3904 ") {
		t.Errorf("one too few: %q", w)
	}
}

func TestTheStartSaysThatDescriptorsAreFew(t *testing.T) {
	fleet := startSimFleet(t, 1, 200_000)
	file := fleet.configFile(t, "limits: {in_flight: 1000, connections: 1000}")
	start := func(limit string) *program {
		return startCommand(t, exec.Command("sh", "-c", `ulimit -n `+limit+`; exec "$0" serve --config "$1"`, os.Args[0], file.path))
	}
	start("500").awaitLog(`level=WARN msg="limits.in_flight 1000 and limits.connections 1000 need up to 2102 descriptors, and this process may open 500: `)
	if log := start("2102").log.String(); strings.Contains(log, "descriptors") {
		t.Errorf("with enough of them:\n%s", log)
	}
}
