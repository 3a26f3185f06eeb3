//go:build browser

// Screenshot takes a picture of the live page while a demo runs, for the docs:
//
//	go run -tags browser ./scripts/screenshot --out docs/page.png
//
// It needs chromium, and runs from the repository's root.
package main

import (
	"bufio"
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
)

// picture is what to take.
type picture struct {
	out           string
	width, height int64
	dark          bool
	after         time.Duration
	drain         bool
}

func main() {
	var p picture
	flag.StringVar(&p.out, "out", "docs/page.png", "where the picture goes")
	flag.Int64Var(&p.width, "width", 1280, "of the window")
	flag.Int64Var(&p.height, "height", 1240, "of the window; 0: the whole page")
	flag.BoolVar(&p.dark, "dark", false, "as those see it who prefer dark")
	flag.DurationVar(&p.after, "after", 90*time.Second, "how long the demo runs before")
	flag.BoolVar(&p.drain, "drain", true, "drain a backend some seconds before")
	page := flag.String("page", "", "take this page's picture, and start no demo")
	backends := flag.Int("backends", 6, "of the demo")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, p, *page, *backends); err != nil {
		fmt.Fprintln(os.Stderr, "screenshot:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, p picture, page string, backends int) error {
	if page == "" {
		ctx, end := context.WithCancel(ctx)
		defer end()
		demo, address, err := startDemo(ctx, backends)
		if err != nil {
			return err
		}
		defer demo.Wait()
		defer demo.Process.Signal(os.Interrupt)
		page = address
	}
	png, err := p.take(ctx, page)
	if err != nil {
		return err
	}
	return os.WriteFile(p.out, png, 0o644)
}

// startDemo returns when the demo has told where its live page is.
func startDemo(ctx context.Context, backends int) (demo *exec.Cmd, page string, err error) {
	dir, err := os.MkdirTemp("", "screenshot")
	if err != nil {
		return nil, "", err
	}
	defer os.RemoveAll(dir) // a program that runs needs its file no more
	program := filepath.Join(dir, "warmroute")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", program, ".").CombinedOutput(); err != nil {
		return nil, "", fmt.Errorf("%w: %s", err, out)
	}
	demo = exec.CommandContext(ctx, program, "demo", "--backends", fmt.Sprint(backends))
	out, err := demo.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := demo.Start(); err != nil {
		return nil, "", err
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if _, page, found := strings.Cut(lines.Text(), "Live page: "); found {
			page, _, _ = strings.Cut(page, " ")
			go func() {
				for lines.Scan() { // or it would wait for somebody to read
				}
			}()
			return demo, page, nil
		}
	}
	return nil, "", fmt.Errorf("the demo ended before it told where its page is: %v", demo.Wait())
}

// row is the last backend's.
const row = chromedp.CSS("#backends tbody tr:last-child")

func (p *picture) take(ctx context.Context, page string) (png []byte, err error) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox) // which root has not
	ctx, end := chromedp.NewExecAllocator(ctx, options...)
	defer end()
	ctx, end = chromedp.NewContext(ctx)
	defer end()
	scheme := "light"
	if p.dark {
		scheme = "dark"
	}
	if err := chromedp.Do(ctx,
		chromedp.EmulateViewport(p.width, cmp.Or(p.height, 900)),
		chromedp.Func(func(ctx context.Context, _ *chromedp.Target) error {
			_, err := chromedp.Call(ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
				Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
			})
			return err
		}),
		chromedp.Navigate(page),
		chromedp.WaitVisible(row),
		chromedp.Sleep(p.after),
	); err != nil {
		return nil, err
	}
	if p.drain {
		button := row + " button"
		if err := chromedp.Do(ctx, chromedp.Click(button), chromedp.MouseEvent(input.DispatchMouseEventTypeMouseMoved, 1, 1), chromedp.Blur(button), chromedp.Sleep(3*time.Second)); err != nil {
			return nil, err
		}
	}
	if p.height == 0 {
		return chromedp.Run(ctx, chromedp.FullScreenshot(100))
	}
	return chromedp.Run(ctx, chromedp.CaptureScreenshot())
}
