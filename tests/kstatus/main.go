// Command kstatus reads an object as JSON and prints what kstatus, and so Flux and whatever else waits by it, makes of it.
package main

import (
	"fmt"
	"io"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{}
	if err := object.UnmarshalJSON(text); err != nil {
		return err
	}
	result, err := status.Compute(object)
	if err != nil {
		return err
	}
	fmt.Println(result.Status)
	return nil
}
