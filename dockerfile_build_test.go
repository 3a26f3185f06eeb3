//go:build image

package main

import (
	"bytes"
	"debug/elf"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestImageBinaryIsStaticAndRuns builds as the Dockerfile does, without
// Docker. Behind a tag, since -trimpath compiles every package anew.
func TestImageBinaryIsStaticAndRuns(t *testing.T) {
	var command string
	for _, line := range dockerfileStages(t)[0] {
		if at := strings.Index(line, "CGO_ENABLED="); at >= 0 {
			command = line[at:]
		}
	}
	binary := filepath.Join(t.TempDir(), "warmroute")
	command = strings.Replace(command, "-o /warmroute", "-o "+binary, 1)
	if !strings.Contains(command, binary) {
		t.Fatalf("the Dockerfile builds nothing: %q", command)
	}
	if output, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, output)
	}
	file, err := elf.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			t.Error("it asks for a dynamic linker, and scratch has none")
		}
	}
	version := exec.CommandContext(t.Context(), binary, "version")
	version.Env = []string{}
	if output, err := version.CombinedOutput(); err != nil || !bytes.HasPrefix(output, []byte("warmroute ")) {
		t.Errorf("it printed %q: %v", output, err)
	}
}
