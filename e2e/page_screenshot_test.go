//go:build browser

package e2e

import (
	"bufio"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
)

var screenshotFile = flag.String("screenshot", "", "write a screenshot of the live page, after 90 s of the demo, to this PNG `FILE`")

// TestPageScreenshot captures the live page of a demo with a drained backend. With
// -screenshot it makes the picture of README.md.
func TestPageScreenshot(t *testing.T) {
	load, file := time.Second, filepath.Join(t.TempDir(), "page.png")
	if *screenshotFile != "" {
		load, file = 90*time.Second, *screenshotFile
	}
	page := openPage(t, startDemo(t))
	row := chromedp.CSS("#backends tbody tr:last-child")
	page.do(chromedp.EmulateViewport(1280, 1240), chromedp.WaitVisible(row))
	page.prefers("light")
	time.Sleep(load)
	button := row + " button"
	page.do(chromedp.Click(button), chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, 1, 1), chromedp.Blur(button))
	page.until(`document.querySelector('#progress').textContent !== ''`)
	page.until(`document.querySelector('#progress').textContent === ''`)
	png, err := chromedp.Run(page.ctx, chromedp.CaptureScreenshot())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, png, 0o644); err != nil {
		t.Fatal(err)
	}
}

// startDemo starts a demo of six backends and returns the URL of its live page.
func startDemo(t *testing.T) (page string) {
	t.Helper()
	cmd := exec.Command(binary, "demo", "--backends", "6")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	urls := make(chan string, 1)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if m := regexp.MustCompile(`Live page: (\S+)`).FindStringSubmatch(lines.Text()); m != nil {
				urls <- m[1]
			}
		}
		cmd.Wait()
	}()
	t.Cleanup(func() { cmd.Process.Signal(os.Interrupt); <-ended })
	select {
	case page = <-urls:
	case <-ended:
		t.Fatal("the demo ended before it printed the URL of its live page")
	}
	return page
}
