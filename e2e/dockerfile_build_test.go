//go:build image && linux

package e2e

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// imageBinary builds as the Dockerfile does, without Docker. Behind a tag, since
// -trimpath compiles every package anew.
func imageBinary(t *testing.T) (binary string) {
	t.Helper()
	var command string
	for _, line := range dockerfileStages(t)[0] {
		if at := strings.Index(line, "CGO_ENABLED="); at >= 0 {
			command = line[at:]
		}
	}
	binary = filepath.Join(t.TempDir(), "warmroute")
	command = strings.Replace(command, "-o /warmroute", "-o "+binary, 1)
	if !strings.Contains(command, binary) {
		t.Fatalf("the Dockerfile builds nothing: %q", command)
	}
	if output, err := exec.CommandContext(t.Context(), "sh", "-c", command).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", command, err, output)
	}
	return binary
}

func TestImageAsBuilt(t *testing.T) {
	binary := imageBinary(t)
	t.Run("the binary is static and runs", func(t *testing.T) { binaryStandsAlone(t, binary) })
	root := imageRoot(t, binary)
	t.Run("it serves as nobody, from its own files", func(t *testing.T) { servesAsNobody(t, root) })
}

func binaryStandsAlone(t *testing.T, binary string) {
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

// imageRoot is the file system of the final stage. What that does not give to its
// user, nobody may write to.
func imageRoot(t *testing.T, binary string) (root string) {
	t.Helper()
	root = t.TempDir()
	final := dockerfileStages(t)[1]
	owner := instruction(t, final, "USER")
	for _, line := range final {
		copied, ok := strings.CutPrefix(line, "COPY --from=build ")
		if !ok {
			continue
		}
		words := strings.Fields(copied)
		to := filepath.Join(root, words[len(words)-1])
		if strings.HasSuffix(words[len(words)-1], "/") {
			to = filepath.Join(to, filepath.Base(words[len(words)-2]))
		}
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch {
		case words[0] == "--chown="+owner:
			err = os.Mkdir(to, 0o700)
		case words[0] == "/warmroute":
			err = os.Rename(binary, to)
		default:
			err = os.WriteFile(to, nil, 0o444) // of Debian's, and not needed here
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, dir := range []string{root, filepath.Join(root, "var"), filepath.Join(root, "var", "lib")} {
		if err := os.Chmod(dir, 0o555); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.Chmod(dir, 0o755) })
	}
	return root
}

// inImage is a command of the image, run by its user, who sees nothing but its files.
func inImage(t *testing.T, root string, argv []string, env ...string) *exec.Cmd {
	t.Helper()
	id, _, _ := strings.Cut(instruction(t, dockerfileStages(t)[1], "USER"), ":")
	user, err := strconv.Atoi(id)
	if err != nil {
		t.Fatal(err)
	}
	return &exec.Cmd{
		Path: argv[0], Args: argv, Env: append([]string{"NONE="}, env...), Dir: "/",
		SysProcAttr: &syscall.SysProcAttr{
			Chroot: root, Cloneflags: syscall.CLONE_NEWUSER,
			UidMappings: []syscall.SysProcIDMap{{ContainerID: user, HostID: os.Getuid(), Size: 1}},
			GidMappings: []syscall.SysProcIDMap{{ContainerID: user, HostID: os.Getgid(), Size: 1}},
		},
	}
}

func servesAsNobody(t *testing.T, root string) {
	fleet := startSimFleet(t, 2, 200_000)
	final := dockerfileStages(t)[1]
	entry := execForm(t, instruction(t, final, "ENTRYPOINT"))
	serve := append(append(entry, execForm(t, instruction(t, final, "CMD"))...), fleet.urls...)
	p := startCommand(t, inImage(t, root, serve,
		"WARMROUTE_LISTEN=127.0.0.1:0", "WARMROUTE_ADMIN=127.0.0.1:0", "WARMROUTE_TIMEOUTS_SERVE_AFTER_TERM=0s",
		"WARMROUTE_INDEX_SNAPSHOT=/var/lib/warmroute/index"))
	// The ports are known by now, as they are to whoever sets them.
	check := execForm(t, instruction(t, final, "HEALTHCHECK"))
	if output, err := inImage(t, root, check, "WARMROUTE_LISTEN="+strings.TrimPrefix(p.url, "http://")).CombinedOutput(); err != nil {
		t.Errorf("not healthy: %v %s", err, output)
	}
	if output, err := inImage(t, root, check, "WARMROUTE_LISTEN=127.0.0.1:1").CombinedOutput(); err == nil {
		t.Errorf("healthy where nobody listens: %s", output)
	}
	p.signal(syscall.SIGTERM)
	if status := p.exit(); status != 0 {
		t.Errorf("it ended with status %d", status)
	}
	if _, err := os.Stat(filepath.Join(root, "var/lib/warmroute/index")); err != nil {
		t.Errorf("it has left no snapshot: %v; the log:\n%s", err, p.log.String())
	}
}
